"""What an engine must compute whose durable slots store states in fewer bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import numpy as np
import torch
from mambaslots import state_spec
from mambaslots.inference.contexts import device_memory
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.kernels.reference.torch_state_copy import dequantise, quantise
from mambaslots.state_spec import SCALES, EncodedTensor, StateTensor, durable_tensors
from numpy.typing import NDArray
from oracle.recurrent_lm import RecurrentLM, log_sum_exp

Array = NDArray[np.float64]


@contextmanager
def stored_apart(settings: dict[str, object]) -> Iterator[None]:
    """Engines that are built within it encode durable states in a way that loses nothing.

    So the exact answers of other suites hold for them. `settings` are an engine's, and get an encoding.
    """

    def lossless(states: tuple[StateTensor, ...], dtype: str | None) -> tuple[StateTensor, ...]:
        if dtype is None:
            return states
        return tuple(
            EncodedTensor(one.name, one.num_layers, one.shape, one.dtype, one.grid, one.split)
            for one in states
        )

    if settings.get("enable_prefix_caching", True):
        settings["durable_state_dtype"] = "bfloat16"
    with (
        patch.object(state_spec, "durable_tensors", lossless),
        patch.object(device_memory, "durable_tensors", lossless),
    ):
        yield


class RoundedEngine:
    """Observes an engine, and computes token by token what it must answer.

    A slot holds here the state that the recurrence has where the engine stores one; a block, the keys and
    values. A request that resumes continues from the slot's state, rounded by the codec's reference. So the
    history of each state counts: a state may come from a request that had itself resumed.
    """

    def __init__(self, engine: ms.DynamicInferenceEngine, model: ms.models.HybridLM, dtype: str) -> None:
        """`dtype`: `durable_state_dtype`."""
        self.num_resumed = 0
        self.log_probs: dict[int, dict[int, tuple[int, float]]] = {}
        self._engine = engine
        self._context = engine.context
        self._size = engine.config.block_size_tokens
        self._states = model.state_spec().states
        self._stored = {tensor.name: tensor.dtype for tensor in durable_tensors(self._states, dtype)}
        self._lm = _WithKnownKV(model)
        self._slots: dict[int, dict[str, Array]] = {}
        self._kv: dict[int, tuple[list[Array], list[Array]]] = {}  # block * size + offset -> keys, values
        self._running: dict[Any, tuple[int, dict[str, Array]]] = {}  # allocation -> position and state
        self._begun: dict[int, tuple[list[int], int]] = {}  # row -> blocks, and how many are registered
        self._context.observers.append(self)

    def read_weights(self, model: ms.models.HybridLM) -> None:
        """The engine's model has the weights of `model` now; what is under way is not checked."""
        self._lm = _WithKnownKV(model)

    def known(self, request_id: int, num_prompt_tokens: int) -> list[tuple[int, float]]:
        """The greedy tokens of a request so far, and their log-probs; more than were generated, perhaps."""
        found = self.log_probs.get(request_id, {})
        return [found[at] for at in takewhile(found.__contains__, count(num_prompt_tokens))]

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: object) -> None:
        slots = self._context.prefix_cache.slots
        for scheduled in batch:
            path = scheduled.allocation.path
            self._begun[scheduled.allocation.row] = list(path.blocks), path.num_registered
            position, _ = self._running.get(scheduled.allocation, (0, {}))
            if scheduled.start == 0:
                self._lm.reset()
                self._running[scheduled.allocation] = 0, _copied(self._lm.states)
            elif position != scheduled.start:
                self.num_resumed += 1
                stored = self._slots[slots.cached_states.slot_of(scheduled.block_at(scheduled.start))]
                self._running[scheduled.allocation] = scheduled.start, self.rounded(stored)

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        self._slots.update(
            (scheduled.destinations[position], state)
            for scheduled in batch
            for position, state in self._advance(scheduled).items()
        )

    def _advance(self, scheduled: ScheduledRequest) -> dict[int, dict[str, Array]]:
        """Compute a step's tokens; the states at its destinations."""
        blocks, num_registered = self._begun[scheduled.allocation.row]
        position, states = self._running[scheduled.allocation]
        assert position == scheduled.start
        places = [blocks[at // self._size] * self._size + at % self._size for at in range(scheduled.stop)]
        registered = num_registered * self._size
        lm = self._lm
        lm.begin(states, [self._kv[place] for place in places[:position]])
        taken = {}
        found = self.log_probs.setdefault(scheduled.request.request_id, {})
        for at in range(scheduled.start, scheduled.stop):
            known = self._kv[places[at]] if at < registered else None
            logits = lm.step_with(scheduled.request.tokens[at], known)
            if known is None:
                self._kv[places[at]] = lm.newest_kv()
            if at + 1 in scheduled.destinations:
                taken[at + 1] = _copied(lm.states)
            best = int(logits.argmax())
            found.setdefault(at + 1, (best, float(logits[best] - log_sum_exp(logits))))
        self._running[scheduled.allocation] = scheduled.stop, _copied(lm.states)
        return taken

    def rounded(self, states: dict[str, Array]) -> dict[str, Array]:
        """`states` as they are when they are decoded."""
        found = {}
        for state in self._states:
            exact, axis = torch.from_numpy(states[state.name]), state.scale_axis
            if state.name + SCALES not in self._stored or axis is None:
                decoded = exact.to(self._stored[state.name])
            else:
                decoded = dequantise(*quantise(exact, axis + 1), axis + 1)
            found[state.name] = decoded.double().numpy()
        return found

    def check(self, result: ms.RequestResult, num_prompt_tokens: int) -> None:
        """A greedy result that has log-probs."""
        assert result.log_probs is not None
        known = self.log_probs[result.request_id]
        for index, (token, log_prob) in enumerate(zip(result.tokens, result.log_probs, strict=True)):
            best, expected = known[num_prompt_tokens + index]
            assert token == best
            assert abs(log_prob - expected) < 1e-9


class _WithKnownKV(RecurrentLM):
    """Takes states, keys and values from outside."""

    def begin(self, states: dict[str, Array], kv: Sequence[tuple[list[Array], list[Array]]]) -> None:
        """Continue from this state, behind tokens with these keys and values."""
        self.reset()
        self.states = _copied(states)
        self.position = len(kv)
        if kv:
            self.keys = [np.stack([keys[layer] for keys, _ in kv]) for layer in range(len(self.keys))]
            self.values = [np.stack([values[layer] for _, values in kv]) for layer in range(len(self.values))]

    def step_with(self, token: int, known: tuple[list[Array], list[Array]] | None) -> Array:
        """`step`; with `known` keys and values of the token in place of its own."""
        if known is not None:
            self.keys, self.values = _Known(self.keys, known[0]), _Known(self.values, known[1])
        logits = self.step(token)
        self.keys, self.values = list(self.keys), list(self.values)
        return logits

    def newest_kv(self) -> tuple[list[Array], list[Array]]:
        return [keys[-1].copy() for keys in self.keys], [values[-1].copy() for values in self.values]


class _Known(list[Array]):
    """By layer; what is appended for the newest token is replaced by what is known."""

    def __init__(self, entries: list[Array], known: list[Array]) -> None:
        super().__init__(entries)
        self._known = known

    def __setitem__(self, layer: Any, entries: Any) -> None:
        entries = entries.copy()
        entries[-1] = self._known[layer]
        super().__setitem__(layer, entries)


def _copied(states: dict[str, Array]) -> dict[str, Array]:
    return {name: entries.copy() for name, entries in states.items()}
