"""A tiny hybrid model whose weights change, which fails when asked to, and whose logits can be NaN.

A recurrent layer (a short convolution, and decaying sums of what it gives), then one attention layer, in
numpy and float64; a `ToyKind` may lack the sums or the attention. The model computes one row of a step after
the other. `oracle.toy_answers` says what the model must answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import mambaslots as ms
import numpy as np
import torch
from mambaslots.state_spec import StateTensor
from numpy.typing import NDArray
from torch import Tensor

VOCABULARY, DIM, TAPS = 31, 6, 3
Array = NDArray[np.float64]


class ForwardError(Exception):
    """What a failing forward raises."""


@dataclass(frozen=True)
class ToyKind:
    """What a toy remembers of a sequence, beside the convolution's window.

    Attributes:
        grids: of its decaying sums: inside a prefill, each exists at multiples of its number alone.
        attention: whether it has keys and values.
    """

    grids: tuple[int, ...] = (4,)
    attention: bool = True


TOYS = {
    "one sum": ToyKind(),
    "two sums": ToyKind((4, 2)),
    "window": ToyKind(()),
    "sums alone": ToyKind((2, 4), attention=False),
    "window alone": ToyKind((), attention=False),
}


@dataclass(frozen=True)
class Weights:
    """The weights of one version of the model."""

    embedding: Array  # [VOCABULARY, DIM]
    head: Array  # [DIM, VOCABULARY]
    taps: Array  # [TAPS, DIM]
    decay: Array  # [DIM]
    query: Array  # [DIM, DIM]
    key: Array  # [DIM, DIM]
    value: Array  # [DIM, DIM]

    @classmethod
    def of(cls, version: int) -> "Weights":
        random = np.random.default_rng(1000 + version)
        return cls(
            embedding=random.normal(size=(VOCABULARY, DIM)),
            head=random.normal(size=(DIM, VOCABULARY)),
            taps=random.normal(size=(TAPS, DIM)) / 2,
            decay=np.linspace(0.6, 0.97, DIM),
            query=random.normal(size=(DIM, DIM)) / 2,
            key=random.normal(size=(DIM, DIM)) / 2,
            value=random.normal(size=(DIM, DIM)) / 2,
        )


@cache
def weights_of(version: int) -> Weights:
    return Weights.of(version)


def decays_of(weights: Weights, kind: ToyKind) -> list[Array]:
    """Of each sum: [DIM]."""
    return [weights.decay ** (1 + number) for number, _ in enumerate(kind.grids)]


class ToyLM:
    """What an engine under test serves.

    Attributes:
        kind: what the model remembers.
        version: which weights the model has now; may be set between two steps.
        fails: "before" or "after" makes the next forward raise a `ForwardError` there; "" makes none.
        spoils: the next forward makes the logits, stored states, keys and values of one row NaN: of the row
            with this number, modulo the rows that have logits. None spoils nothing.
        during: called once, in the middle of the next forward.
        num_spoiled: how many forwards were spoiled.
    """

    def __init__(self, in_place: bool = False, kind: ToyKind = TOYS["one sum"]) -> None:
        """`in_place`: whether kernels update states where they lie, and read no state elsewhere."""
        self._in_place = in_place
        self.kind = kind
        self.version = 0
        self.fails = ""
        self.spoils: int | None = None
        self.during: Callable[[], None] | None = None
        self.num_spoiled = 0

    def state_spec(self) -> ms.HybridStateSpec:
        return ms.HybridStateSpec(
            states=(
                StateTensor("window", 1, (TAPS - 1, DIM), torch.float64),
                *(
                    StateTensor(f"sum_{number}", 1, (DIM,), torch.float64, grid)
                    for number, grid in enumerate(self.kind.grids)
                ),
            ),
            num_attention_layers=int(self.kind.attention), num_kv_heads=1, head_dim=DIM,
            kv_dtype=torch.float64,
            vocab_size=VOCABULARY, device=torch.device("cpu"), separate_states=not self._in_place,
        )  # fmt: skip

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise ForwardError(fails)
        during, self.during = self.during, None
        if during is not None:
            during()
        weights = weights_of(self.version)
        spans = _spans(inputs)
        x = weights.embedding[inputs.token_ids.numpy()]
        x = x + self._recur(weights, x, spans, inputs)
        if self.kind.attention:
            x = x + _attend(weights, x, spans, inputs)
        logits = x[inputs.logit_tokens.numpy()] @ weights.head
        if self.spoils is not None:
            self._spoil(self.spoils, logits, spans, inputs)
        if fails == "after":
            raise ForwardError(fails)
        return torch.from_numpy(logits)

    def _recur(
        self, weights: Weights, x: Array, spans: list[tuple[int, int]], inputs: ms.StepInputs
    ) -> Array:
        pool = inputs.state_pool
        windows, *sums = (states[0].numpy() for states in pool.tensors)
        decays = decays_of(weights, self.kind)
        sources = inputs.state_sources.tolist()
        if self._in_place:
            written = {-1, *inputs.state_destinations.tolist()}
            assert written.issuperset(sources), "a kernel that updates in place reads what it does not write"
        begins = [
            [
                states[source].copy() if source >= 0 else np.zeros(states.shape[1:])
                for states in (windows, *sums)
            ]
            for source in sources
        ]
        out, after_windows = np.empty_like(x), np.empty((len(x), TAPS - 1, DIM))
        after = np.empty((len(x), len(sums), DIM))
        for (first, stop), (window, *state) in zip(spans, begins, strict=True):
            seen = np.concatenate([window, x[first:stop]])
            for token in range(first, stop):
                taken = seen[token - first : token - first + TAPS]
                mixed = (taken * weights.taps).sum(0)
                state = [decay * old + mixed for decay, old in zip(decays, state, strict=True)]
                out[token] = sum(state) if state else mixed
                after_windows[token] = taken[1:]
                after[token] = np.reshape(state, (len(sums), DIM))
        for tokens, places in _stores_of_windows(inputs, spans):
            windows[places] = after_windows[tokens]
        for number, grid in enumerate(self.kind.grids):
            ends, inside = _stores_of_sums(inputs, spans)
            positions = inputs.positions.numpy()[inside[0]] + 1
            assert not (positions % grid).any(), "a state is wanted where it does not exist"
            for tokens, places in (ends, inside):
                sums[number][places] = after[tokens, number]
        return np.tanh(out)

    def _spoil(self, number: int, logits: Array, spans: list[tuple[int, int]], inputs: ms.StepInputs) -> None:
        tokens = inputs.logit_tokens.numpy()
        rows = [row for row, (first, stop) in enumerate(spans) if ((first <= tokens) & (tokens < stop)).any()]
        if not rows:
            return
        first, stop = spans[rows[number % len(rows)]]
        logits[(first <= tokens) & (tokens < stop)] = np.nan
        windows, *sums = (states[0].numpy() for states in inputs.state_pool.tensors)
        for states, stores in (
            (windows, _stores_of_windows(inputs, spans)),
            *((states, _stores_of_sums(inputs, spans)) for states in sums),
        ):
            for stored, places in stores:
                states[places[(first <= stored) & (stored < stop)]] = np.nan
        written, places = _kept(inputs.kv_write_tokens.numpy(), inputs.kv_write_positions.numpy())
        for part in inputs.kv_cache[:1].flatten(0, 1).numpy():
            part.reshape(-1, DIM)[places[(first <= written) & (written < stop)]] = np.nan
        self.spoils = None
        self.num_spoiled += 1


def _spans(inputs: ms.StepInputs) -> list[tuple[int, int]]:
    """The first token of each row, and the token behind its last one."""
    width, decoded = inputs.shape.decode_tokens, inputs.num_decode_tokens
    starts = [decoded + start for start in inputs.chunks.query_start_loc.tolist()]
    decodes = [(first, first + width) for first in range(0, decoded, width)]
    return decodes + list(pairwise(starts))


Store = tuple[NDArray[np.int64], NDArray[np.int64]]


def _kept(tokens: NDArray[np.int64], places: NDArray[np.int64]) -> Store:
    return tokens[places >= 0], places[places >= 0]


def _stores_of_ends(inputs: ms.StepInputs, spans: list[tuple[int, int]]) -> Store:
    """Behind each decode token, and behind the last token of each prefill row."""
    lasts = [stop - 1 for _, stop in spans[inputs.num_decodes :]]
    tokens = np.array([*range(inputs.num_decode_tokens), *lasts], dtype=np.int64)
    return _kept(tokens, inputs.state_destinations.numpy())


def _stores_of_windows(inputs: ms.StepInputs, spans: list[tuple[int, int]]) -> list[Store]:
    """Behind which tokens convolution windows are stored, and where."""
    inside = inputs.checkpoints
    tokens = inputs.num_decode_tokens + inside.token_ends.numpy() - 1
    return [_stores_of_ends(inputs, spans), _kept(tokens, inside.destinations.numpy())]


def _stores_of_sums(inputs: ms.StepInputs, spans: list[tuple[int, int]]) -> list[Store]:
    chunks = inputs.chunks
    tokens = inputs.num_decode_tokens + chunks.cu_chunk_seqlens[1:].long().numpy() - 1
    return [_stores_of_ends(inputs, spans), _kept(tokens, chunks.destinations.numpy())]


def _attend(weights: Weights, x: Array, spans: list[tuple[int, int]], inputs: ms.StepInputs) -> Array:
    positions, table = inputs.positions.numpy(), inputs.block_table.numpy()
    turn = np.cos(0.3 * positions)[:, None]
    query, key, value = (x @ weights.query) * turn, (x @ weights.key) * turn, x @ weights.value
    keys, values = inputs.kv_cache[0].numpy()  # each [blocks, block size, 1, DIM]
    tokens, places = _kept(inputs.kv_write_tokens.numpy(), inputs.kv_write_positions.numpy())
    keys.reshape(-1, DIM)[places] = key[tokens]
    values.reshape(-1, DIM)[places] = value[tokens]
    out = np.empty_like(x)
    for row, (first, stop) in enumerate(spans):
        length = int(positions[first:stop].max()) + 1
        own_keys = keys[table[row]].reshape(-1, DIM)[:length]
        own_values = values[table[row]].reshape(-1, DIM)[:length]
        scores = query[first:stop] @ own_keys.T / np.sqrt(DIM)
        seen = np.arange(length) <= positions[first:stop, None]
        parts = np.exp(
            np.where(seen, scores - scores.max(-1, keepdims=True, where=seen, initial=-1e9), -np.inf)
        )
        out[first:stop] = parts @ own_values / parts.sum(-1, keepdims=True)
    return out
