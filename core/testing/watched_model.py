"""A model in an engine, every call of which is judged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..inference.engines.runner import Model
from ..state_spec import HybridStateSpec
from ..validation import shown

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rule(StrEnum):
    """What a model must keep; `fix` says what to do where it does not."""

    SPEC = "spec"
    RAISES = "raises"
    LOGITS = "logits"
    INPUTS_CHANGED = "inputs changed"
    NOT_WRITTEN = "not written"
    FOREIGN_WRITE = "foreign write"
    FREE_MEMORY_READ = "free memory read"
    CUTS_DIFFER = "cuts differ"
    DECODE_DIFFERS = "decode differs"
    BATCH_DIFFERS = "batch differs"
    CACHE_DIFFERS = "cache differs"
    DRAFTS_DIFFER = "drafts differ"
    PADDING_DIFFERS = "padding differs"

    @property
    def fix(self) -> str:
        return _FIXES[self]


_FIXES = {
    Rule.SPEC: "Return the same HybridStateSpec at every call.",
    Rule.RAISES: "Serve every step that StepInputs allows: decode rows, prefill rows, or both.",
    Rule.LOGITS: "Return finite logits of inputs.logit_tokens, [tokens, vocab_size]; write finite numbers.",
    Rule.INPUTS_CHANGED: "Copy index tensors before changing them: later layers and steps read them.",
    Rule.NOT_WRITTEN: "Write all layers of every state tensor at state_destinations, chunks.destinations "
    "(scans) and checkpoints.destinations (windows), and KV at kv_write_positions; not where -1.",
    Rule.FOREIGN_WRITE: "Write destinations and kv_write_positions only; drop -1 before indexing: other "
    "slots are other requests' states, and sources may be cached states.",
    Rule.FREE_MEMORY_READ: "Read state_sources and kv_lengths tokens of a row, no more. Mask -1 and later "
    "positions with masked_fill or torch.where, scores and values: 0 * NaN is NaN. Overwrite destinations.",
    Rule.CUTS_DIFFER: "A token sees itself and the tokens before it, also of earlier steps: begin with "
    "state_sources, attend to kv_lengths tokens, write at each destination the state after its token.",
    Rule.DECODE_DIFFERS: "Compare the recurrence of one token with the prefill's. Read all sources of a "
    "layer before its first write; take positions from inputs.positions.",
    Rule.BATCH_DIFFERS: "Rows are independent: check which tokens, sources and blocks belong to which row.",
    Rule.CACHE_DIFFERS: "Resumed rows begin after position 0, and tokens may have their KV cached already.",
    Rule.DRAFTS_DIFFER: "Token j of a decode row sees KV up to its position and the state after the tokens "
    "before it; its state goes to decode_destinations[row, j]. Or pass num_speculative_tokens=0.",
    Rule.PADDING_DIFFERS: "Padding rows have kv_lengths 0 and -1 everywhere; padding tokens follow the real "
    "ones. Or pass padded_shapes=False, and never capture CUDA graphs.",
}  # fmt: skip


@dataclass(frozen=True)
class StepRow:
    """The real tokens of one row, drafts included, which follow `start` tokens of the sequence."""

    first: int  # of its tokens, among the step's packed tokens
    start: int
    tokens: tuple[int, ...]
    source: int  # pool index of the state before the tokens; -1 for none
    blocks: tuple[int, ...]  # KV blocks in order, as many as the tokens fill

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepMemory:
    """Which memory a step names: what its model may read, and what it must write; padding left out.

    A place is block * block size + offset. A prefill of 5 tokens with blocks of 4, in blocks 2 and 7:
    kv_writes has the places 8 to 11 and 28.
    """

    rows: tuple[StepRow, ...]  # decodes, then prefills
    writes: dict[int, tuple[int, int]]  # pool index -> (row, tokens after which the state is stored there)
    kv_writes: dict[int, tuple[int, int]]  # place -> (row, position of its token)
    reads: frozenset[int]  # the other places that hold tokens of the rows
    logits: tuple[tuple[int, int], ...]  # (row, position) of tokens whose logits are returned

    @classmethod
    def from_inputs(cls, inputs: StepInputs) -> "StepMemory":
        """Read a step, padded or not; synchronises."""
        size, ids, chunks, checkpoints = (
            inputs.kv_cache.shape[3],
            inputs.token_ids.tolist(),
            inputs.chunks,
            inputs.checkpoints,
        )
        columns = (
            inputs.query_start_loc[:-1], inputs.query_lengths, inputs.kv_lengths, inputs.state_sources,
            inputs.block_table,
        )  # fmt: skip
        rows = tuple(
            StepRow(
                first,
                length - count,
                tuple(ids[first : first + count]),
                source,
                tuple(blocks[: -(-length // size)]),
            )
            for first, count, length, source, blocks in zip(*(x.tolist() for x in columns), strict=True)
            if count  # else it is padding
        )
        token_rows = {
            row.first + offset: (index, row.start + offset)
            for index, row in enumerate(rows)
            for offset in range(len(row.tokens))
        }
        positions = zip(inputs.kv_write_tokens.tolist(), inputs.kv_write_positions.tolist(), strict=True)
        kv_writes = {place: token_rows[token] for token, place in positions if place >= 0}
        held = {row.blocks[at // size] * size + at % size for row in rows for at in range(row.stop)}
        decoded = inputs.num_decode_tokens
        stops = torch.cat([chunks.query_start_loc[1:], chunks.cu_chunk_seqlens[1:], checkpoints.token_ends])
        slots = torch.cat([inputs.state_destinations, chunks.destinations, checkpoints.destinations])
        ends = [*range(decoded), *(decoded + stop - 1 for stop in stops.tolist())]
        written = (
            (token_rows[token], slot) for token, slot in zip(ends, slots.tolist(), strict=True) if slot >= 0
        )
        return cls(
            rows=rows,
            writes={slot: (row, position + 1) for (row, position), slot in written},
            kv_writes=kv_writes,
            reads=frozenset(held - kv_writes.keys()),
            logits=tuple(token_rows[token] for token in inputs.logit_tokens.tolist()[: inputs.num_logits]),
        )

    @property
    def sources(self) -> set[int]:
        """The pool indices that the step starts from."""
        return {row.source for row in self.rows if row.source >= 0}

    def tails(self, size: int) -> set[int]:
        """Places after a row's last token in a block that the step begins, where zeros may be written."""
        return {
            row.blocks[-1] * size + offset
            for row in self.rows
            if row.blocks[-1] * size in self.kv_writes
            for offset in range((row.stop - 1) % size + 1, size)
        }


@dataclass(frozen=True)
class Finding:
    """A rule that the model breaks, what was seen, and where first."""

    rule: Rule
    message: str
    where: str = ""

    def __str__(self) -> str:
        place = f" (first in {self.where})" if self.where else ""
        return f"{self.rule.upper()}: {self.message}{place}. {self.rule.fix}"


class _Broken(Exception):  # noqa: N818
    """What ends a call: a rule, and how the model breaks it."""


_Result = tuple[str, tuple[int, ...], Tensor]  # what, of which prefix, its value


class WatchedModel:
    """The model under test in an engine: every call is judged, and answered with the texts."""

    def __init__(self, model: Model, spec: HybridStateSpec, tolerance: float) -> None:
        self.rule = Rule.CUTS_DIFFER  # of the way in which the texts are served now
        self.texts: list[list[int]] = []  # of the rows of the next step
        self.findings: list[Finding] = []
        self.num_calls = self.num_compared = 0
        self.largest_difference = 0.0
        self._model, self._spec, self._tolerance = model, spec, tolerance
        self._block = -(-8 // spec.grid) * spec.grid
        self._known: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # (what, prefix) -> first result

    def state_spec(self) -> HybridStateSpec:
        return self._spec

    def __call__(self, inputs: StepInputs) -> Tensor:
        step = StepMemory.from_inputs(inputs)
        if not self.findings:
            pools = (*inputs.state_pool.tensors, inputs.kv_cache)
            own = [pool.clone() for pool in pools]
            try:
                self._judge(inputs, pools, own, step)
            except _Broken as broken:
                where = f'a step of {len(step.rows)} rows, "{self.rule}"'
                rule, message = broken.args
                self.findings.append(Finding(rule, message, where))
            self._restore(pools, own, step)
        answer = torch.zeros(len(inputs.logit_tokens), self._spec.vocab_size, device=inputs.token_ids.device)
        for index, (row, position) in enumerate(step.logits):
            if position + 1 < len(self.texts[row]):
                answer[index, self.texts[row][position + 1]] = 1.0
        return answer

    def _judge(
        self, inputs: StepInputs, pools: Sequence[Tensor], own: Sequence[Tensor], step: StepMemory
    ) -> None:
        """Call the model where free memory holds NaN; compare what it computes."""
        indices = _index_tensors(inputs)
        originals = {name: tensor.clone() for name, tensor in indices.items()}
        self._poison(pools, step)
        before = [pool.clone() for pool in pools]
        logits = self._call(inputs)
        names = [name for name, tensor in indices.items() if not torch.equal(tensor, originals[name])]
        if names:
            raise _Broken(Rule.INPUTS_CHANGED, f"the model writes to inputs.{', inputs.'.join(names)}")
        strays, missing = self._writes(before, pools, step)
        if strays:
            raise _Broken(Rule.FOREIGN_WRITE, f"the model writes {strays}")
        results = self._results(logits, pools, step)
        if missing or not _is_finite(results):
            for pool, old in zip(pools, own, strict=True):
                pool.copy_(old)
            logits = self._call(inputs)
            _, missing = self._writes(own, pools, step)
            if missing:
                raise _Broken(Rule.NOT_WRITTEN, f"{missing} not written where the step says")
            if not _is_finite(self._results(logits, pools, step)):
                raise _Broken(Rule.LOGITS, "logits, states or KV are NaN or infinite")
            message = "results are NaN where memory that the step does not name holds NaN"
            raise _Broken(Rule.FREE_MEMORY_READ, message)
        self._compare(results)

    def _call(self, inputs: StepInputs) -> Tensor:
        """The model's logits."""
        self.num_calls += 1
        padding = self.rule is Rule.PADDING_DIFFERS
        try:
            logits = self._model(inputs)
        except Exception as error:
            rule = Rule.PADDING_DIFFERS if padding else Rule.RAISES
            raise _Broken(rule, f"{type(error).__name__}: {error}") from error
        accepted = (len(inputs.logit_tokens), self._spec.vocab_size)
        if isinstance(logits, Tensor) and logits.shape == accepted and logits.is_floating_point():
            return logits
        found = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else shown(logits)
        rule = Rule.PADDING_DIFFERS if padding else Rule.LOGITS
        raise _Broken(rule, f"the model returns {found[:80]}; accepted: floats of shape {accepted}")

    def _poison(self, pools: Sequence[Tensor], step: StepMemory) -> None:
        """NaN in all that the step may not read."""
        *states, kv = pools
        read = [(state, (slice(None), list(step.sources))) for state in states]
        for pool, at in (*read, (kv, _at(step.reads, kv.shape[3]))):
            kept = pool[at]
            pool.fill_(float("nan"))
            pool[at] = kept

    def _writes(self, before: Sequence[Tensor], pools: Sequence[Tensor], step: StepMemory) -> tuple[str, str]:
        """What was written that must not be, and what was not written; empty where all is well."""
        strays, missing = "", ""
        changed = [
            old.view(_INTEGERS[old.dtype.itemsize]) != pool.view(_INTEGERS[old.dtype.itemsize])
            for old, pool in zip(before, pools, strict=True)
        ]
        for state, tensor in zip(changed, self._spec.states, strict=False):
            others = [slot for slot in range(state.shape[1]) if slot not in step.writes]
            if state[:, others].any():
                strays = f"{tensor.name!r} of slots that are no destinations of the step"
            fresh = [slot for slot in step.writes if slot not in step.sources]
            if not state[:, fresh].all():  # in place, numbers may stay what they were
                missing = f"{tensor.name!r} is"
        kv, size = changed[-1], pools[-1].shape[3]
        if not kv[_at(step.kv_writes, size)].flatten(3).any(3).all():
            missing = "keys or values are"
        touched = kv.flatten(4).any(4).any(0).any(0).flatten().nonzero().flatten().tolist()
        zeros = {place for place in step.tails(size) if not pools[-1][_at([place], size)].any()}
        if set(touched) - step.kv_writes.keys() - zeros:
            strays = "KV that is not at kv_write_positions"
        return strays, missing

    def _results(self, logits: Tensor, pools: Sequence[Tensor], step: StepMemory) -> list[_Result]:
        """All that the call computed."""

        def prefix(row: int, length: int) -> tuple[int, ...]:
            own = step.rows[row]
            return (*self.texts[row][: own.start], *own.tokens)[:length]

        *states, kv = pools
        size = kv.shape[3]
        found = [("logits", prefix(row, at + 1), logits[i][None]) for i, (row, at) in enumerate(step.logits)]
        for place, (row, at) in step.kv_writes.items():
            found.append(("KV", prefix(row, at + 1), kv[:, :, place // size, place % size].flatten(0, 1)))
        for slot, (row, length) in step.writes.items():
            for tensor, state in zip(self._spec.states, states, strict=True):
                found.append((f"state {tensor.name!r}", prefix(row, length), state[:, slot]))
        return found

    def _compare(self, results: Sequence[_Result]) -> None:
        """Hold everything against the first result of the same prefix, layer by layer."""
        for what, prefix, value in results:
            if len(prefix) > 12 and 4 < len(prefix) % self._block < self._block - 1 and what[0] == "s":
                continue  # a state of any other length: they take memory
            known = self._known.setdefault((what, prefix), value.clone())
            apart, scale = ((known - value).double().flatten(1).abs(), known.double().flatten(1).abs())
            if not apart.numel():
                continue
            scale = scale.amax(1).where(scale.amax(1) > 0, 1.0)
            difference = float((apart.amax(1) / scale).max())
            self.num_compared += 1
            self.largest_difference = max(self.largest_difference, difference)
            if difference > self._tolerance:
                message = f"{what} after {len(prefix)} tokens differs by {difference:.1e} of its maximum"
                raise _Broken(self.rule, message)

    def _restore(self, pools: Sequence[Tensor], own: Sequence[Tensor], step: StepMemory) -> None:
        """The engine's memory, with what the model wrote where the step says; always finite."""
        written: list[Any] = [(slice(None), list(step.writes)) for _ in pools[:-1]]
        written.append(_at(step.kv_writes, pools[-1].shape[3]))
        for pool, old, at in zip(pools, own, written, strict=True):
            new = pool[at].nan_to_num(0, 0, 0)
            pool.copy_(old)
            pool[at] = new


def _at(places: Iterable[int], size: int) -> tuple[slice, slice, Tensor, Tensor]:
    """The index of places (block * size + offset) in a KV cache."""
    at = torch.tensor(list(places), dtype=torch.int64)
    return slice(None), slice(None), at // size, at % size


def _is_finite(results: Sequence[_Result]) -> bool:
    return all(bool(value.isfinite().all()) for _, _, value in results)


def _index_tensors(inputs: StepInputs) -> dict[str, Tensor]:
    """The tensors of a step by name, without the pools."""
    found: dict[str, Tensor] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor) and field.name != "kv_cache":
            found[field.name] = value
        elif is_dataclass(value):
            parts = ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in fields(value))
            found |= {name: part for name, part in parts if isinstance(part, Tensor)}
    return found
