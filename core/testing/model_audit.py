"""A model between an engine and the model under test, which judges every call by what the step names."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..state_spec import HybridStateSpec
from .call_rules import describe_error, judge_kv, judge_strays, wrong_logits
from .differences import outcome_difference
from .memory_stage import FREE_MEMORY, Fill, MemoryStage, Outcome
from .prefix_book import Observation
from .read_probes import SourceProbes, explain_dependence
from .report import Findings
from .rules import Rule
from .step_memory import StepMemory, WriteKind
from .step_padding import larger_shape, padded
from .trial import ModelRaisedError, Trial
from .write_record import WriteRecord

_PROBES_A_KIND = 4


class ModelAudit:
    """Serves an engine as its model: runs the model under test on a scratch stage, and judges what it did.

    The engine gets the states and KV that the step names, and logits that make it generate the texts of
    `scripts`, whatever the model answers: so every way of serving a text computes the same tokens.

    Attributes:
        scenario: what is served; part of every finding.
        live: the live slots of the rows of the next step; whoever observes the engine sets them.
        scripts: of each row of the next step, the tokens of its whole text. Whoever observes the engine
            sets them before the step.
        findings: what was found so far.
        writes: which states were written so far.
        observations: logits, KV and states of the calls since they were taken last.
        reached: how often each part of the protocol was exercised.
    """

    def __init__(
        self,
        model: Callable[[StepInputs], object],
        spec: HybridStateSpec,
        tolerance: float,
        seed: int,
        watched: Callable[[int], bool],
        padded_shapes: bool,
    ) -> None:
        """`watched`: whether the state after so many tokens is to be compared. Every state costs memory."""
        self.scenario = ""
        self.scripts: Sequence[Sequence[int]] = ()
        self.live: Set[int] = frozenset()
        self.findings = Findings()
        self.writes = WriteRecord(spec.states)
        self.observations: list[Observation] = []
        self.reached: Counter[str] = Counter()
        self.num_calls = 0
        self._model = model
        self._spec = spec
        self._tolerance = tolerance
        self._seed = seed
        self._watched = watched
        self._padded_shapes = padded_shapes
        self._stage: MemoryStage | None = None
        self._stage_shape: tuple[int, ...] = ()
        self._probes = SourceProbes(tolerance)
        self._probed: Counter[tuple[object, ...]] = Counter()
        self._draft_slots: set[int] = set()
        self._step = 0

    def state_spec(self) -> HybridStateSpec:
        return self._spec

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Audit one step; returns logits whose largest entries are the next tokens of the scripts."""
        step = StepMemory.from_inputs(inputs)
        self._step += 1
        where = f'"{self.scenario}", a step of {step}'
        trial = Trial(self._stage_for(inputs), self._model, inputs, step, self._spec.separate_states)
        usual = self._first_call(trial, where)
        if usual is not None:
            usual = self._judge_logits(usual, inputs, where)
            judge_strays(self.findings, usual, inputs, where)
            judge_kv(self.findings, usual, inputs, where)
            if self._is_finite(usual, where):
                usual = self._judge_reads(trial, usual, where)
                self.writes.add(step.writes, usual, where)
            _store(inputs, step, usual)
            self._observe(step, usual, where)
        self._count(inputs, step)
        self.num_calls += trial.num_calls
        return self._scripted_logits(inputs, step)

    def judge_whole(self) -> None:
        """Add what only all calls together show."""
        self.writes.judge(self.findings)
        self._probes.judge(self.findings, self.writes)

    def _stage_for(self, inputs: StepInputs) -> MemoryStage:
        """One stage an engine."""
        shape = (*inputs.state_pool.memory.shape, inputs.state_pool.num_live, *inputs.kv_cache.shape)
        if self._stage is None or shape != self._stage_shape:
            self._stage, self._stage_shape = MemoryStage(inputs, self._seed), shape
        return self._stage

    def _first_call(self, trial: Trial, where: str) -> Outcome | None:
        try:
            return trial.run()
        except ModelRaisedError as raised:
            pools = _pool_shapes(self._spec)
            self.findings.add(Rule.RAISES, f"{describe_error(raised.error)}. {pools}", where)
            return None

    def _judge_logits(self, outcome: Outcome, inputs: StepInputs, where: str) -> Outcome:
        """The outcome without its logits, where they are of no use."""
        wrong = wrong_logits(outcome.logits, inputs, self._spec)
        if wrong:
            self.findings.add(Rule.LOGITS_SHAPE, wrong, where)
            return replace(outcome, logits=None)
        logits: Any = outcome.logits
        finite = logits[: inputs.num_logits].isfinite().all(1)
        if not finite.all():
            count = int((~finite).sum())
            message = f"the logits of {count} of {inputs.num_logits} tokens are NaN or infinite"
            self.findings.add(Rule.LOGITS_NOT_FINITE, message, where)
            return replace(outcome, logits=None)
        return outcome

    def _is_finite(self, outcome: Outcome, where: str) -> bool:
        """Whether all that the model wrote are numbers."""
        written = (*outcome.states_written, outcome.kv_written[..., None, None])
        memory = (*outcome.states, outcome.kv)
        finite = all(
            bool((values.isfinite() | ~mask).all()) for values, mask in zip(memory, written, strict=True)
        )
        if not finite:
            message = "the model writes states or KV that are NaN or infinite"
            self.findings.add(Rule.STATES_NOT_FINITE, message, where)
        return finite

    def _judge_reads(self, trial: Trial, usual: Outcome, where: str) -> Outcome:
        """Run the step again in other surroundings; returns the outcome with all that was written."""
        step = trial.step
        zeros = Fill()
        if step.has_rows_without_source and self._differs(trial, usual, Fill(zero_sources=True)):
            if self._differs(trial, usual, Fill()):
                self._explain(trial, usual, zeros, where)
                return usual
            self.findings.add(
                Rule.NO_SOURCE_NOT_ZEROS,
                "a row whose source is -1 computes something else than the same row with a source of zeros",
                where,
            )
            zeros = Fill(zero_sources=True)
        surrounded = trial.attempt(replace(zeros, nan=FREE_MEMORY))
        if surrounded is not None:
            usual = replace(usual, states_written=_written(step, usual, surrounded, trial.separate))
        reference = trial.attempt(zeros) if zeros.zero_sources else usual
        if reference is None:
            return usual
        if (
            surrounded is None
            or outcome_difference(reference, surrounded, trial.num_logits) > self._tolerance
        ):
            self._explain(trial, reference, zeros, where)
            return usual
        if zeros.zero_sources:
            return usual
        self._probe_in_place(trial, usual, where)
        self._probe_cached_kv(trial, where)
        self.reached["source probes"] += self._probes.run(trial, usual)
        if self._padded_shapes:
            self._probe_padding(trial, usual, where)
        return usual

    def _explain(self, trial: Trial, usual: Outcome, fill: Fill, where: str) -> None:
        step = trial.step
        width = trial.inputs.shape.decode_tokens
        if self._is_new("reads", step.decodes, len(step.rows), width, step.has_rows_without_source):
            explain_dependence(self.findings, trial, usual, fill, self._tolerance, where)

    def _differs(self, trial: Trial, usual: Outcome, fill: Fill) -> bool:
        outcome = trial.attempt(fill)
        return outcome is None or outcome_difference(usual, outcome, trial.num_logits) > self._tolerance

    def _is_new(self, *kind: object) -> bool:
        """Whether a probe of this kind of step is still to be made."""
        self._probed[kind] += 1
        return self._probed[kind] <= _PROBES_A_KIND

    def _probe_in_place(self, trial: Trial, usual: Outcome, where: str) -> None:
        step = trial.step
        in_place = [row for row in step.rows if row.source in step.slots]
        if not trial.separate or not in_place:
            return
        if not self._is_new("in place", step.decodes > 0, len(in_place) > 1, len(in_place[0].tokens) > 1):
            return
        self.reached["in-place probes"] += 1
        if self._differs(trial, usual, Fill(in_place=True, nan=FREE_MEMORY)):
            self.findings.add(
                Rule.IN_PLACE_DIFFERS,
                "the result is another one where a row's source is also a destination of the row",
                where,
            )

    def _probe_cached_kv(self, trial: Trial, where: str) -> None:
        """Whether KV that is cached is written again: seen only where it is not what would be written."""
        if not trial.step.cached_kv:
            return
        self.reached["cached-KV probes"] += 1
        outcome = trial.attempt(Fill(disturbed_kv=True))
        if outcome is not None and outcome.touched_kv:
            message = f"the model writes the KV of {outcome.touched_kv} tokens that are cached already"
            self.findings.add(Rule.FOREIGN_KV_WRITTEN, message, where)

    def _probe_padding(self, trial: Trial, usual: Outcome, where: str) -> None:
        step, shape = trial.step, trial.inputs.shape
        resumes = any(row.source >= 0 for row in step.rows if not row.decode)
        kind = step.decodes > 0, shape.decode_tokens > 1, shape.prefills > 0, resumes, shape.checkpoints > 0
        if not self._is_new("padding", *kind):
            return
        self.reached["padded steps"] += 1
        inputs = padded(trial.inputs, larger_shape(shape))
        where = f"{where}, padded to {inputs.shape}"
        padded_trial = Trial(trial.stage, self._model, inputs, step, trial.separate)
        try:
            outcome = padded_trial.run(Fill(nan=FREE_MEMORY))
        except ModelRaisedError as raised:
            self.findings.add(Rule.PADDING_DIFFERS, describe_error(raised.error), where)
            return
        finally:
            self.num_calls += padded_trial.num_calls
        judge_strays(self.findings, outcome, inputs, where)
        wrong = "" if usual.logits is None else wrong_logits(outcome.logits, inputs, self._spec)
        if wrong:
            self.findings.add(Rule.PADDING_DIFFERS, wrong, where)
        elif outcome_difference(usual, outcome, trial.num_logits) > self._tolerance:
            message = (
                "real tokens get other logits, KV or states where padding tokens and rows lie behind them"
            )
            self.findings.add(Rule.PADDING_DIFFERS, message, where)

    def _observe(self, step: StepMemory, outcome: Outcome, where: str) -> None:
        def prefix(row: int, length: int) -> tuple[int, ...]:
            own = step.rows[row]
            return (*self.scripts[row][: own.start], *own.tokens)[:length]

        add = self.observations.append
        if isinstance(outcome.logits, Tensor):
            for index, (row, position) in enumerate(step.logits):
                logits = outcome.logits[index].clone()
                add(Observation(self._step, where, "logits", prefix(row, position + 1), (logits,)))
        for index, kv_write in enumerate(step.kv_writes):
            kv = outcome.kv[:, :, index].clone()
            if kv.numel():
                key = prefix(kv_write.row, kv_write.position + 1)
                add(Observation(self._step, where, "kv", key, (kv,)))
        for index, write in enumerate(step.writes):
            if self._watched(write.position):
                tensors = tuple(states[:, index].clone() for states in outcome.states)
                masks = tuple(written[:, index] for written in outcome.states_written)
                key = prefix(write.row, write.position)
                add(Observation(self._step, where, write.kind, key, tensors, masks))

    def _count(self, inputs: StepInputs, step: StepMemory) -> None:
        reached = self.reached
        reached["steps"] += 1
        reached["decode rows"] += step.decodes
        reached["decode rows of several tokens"] += sum(
            row.decode and len(row.tokens) > 1 for row in step.rows
        )
        reached["prefill rows"] += len(step.rows) - step.decodes
        reached["prefill rows with a source"] += sum(not row.decode and row.source >= 0 for row in step.rows)
        reached["rows resumed from a cached state"] += sum(
            row.source >= 0 and row.source not in self.live for row in step.rows
        )
        reached["rows behind accepted drafts"] += sum(row.source in self._draft_slots for row in step.rows)
        self._draft_slots = {
            write.slot
            for write in step.writes
            if write.kind is WriteKind.DECODE and write.position > step.rows[write.row].start + 1
        }
        reached["decode states into cache"] += sum(
            write.kind is WriteKind.DECODE and write.slot not in self.live for write in step.writes
        )
        reached["states inside prefills"] += sum(write.kind is WriteKind.INNER for write in step.writes)
        reached["tokens whose KV was there"] += sum(len(row.tokens) for row in step.rows) - len(
            step.kv_writes
        )

    def _scripted_logits(self, inputs: StepInputs, step: StepMemory) -> Tensor:
        logits = torch.zeros(len(inputs.logit_tokens), self._spec.vocab_size, device=inputs.token_ids.device)
        for index, (row, position) in enumerate(step.logits):
            script = self.scripts[row]
            if position + 1 < len(script):
                logits[index, script[position + 1]] = 1.0
        return logits


def _pool_shapes(spec: HybridStateSpec) -> str:
    states = ", ".join(
        f"state_pool[{state.name!r}] [{', '.join(map(str, (state.num_layers, 'slots', *state.shape)))}]"
        for state in spec.states
    )
    return (
        f"The pools are {states} and kv_cache [{spec.num_attention_layers}, 2, blocks, block_size_tokens, "
        f"{spec.num_kv_heads}, {spec.head_dim}]"
    )


def _written(step: StepMemory, usual: Outcome, surrounded: Outcome, separate: bool) -> tuple[Tensor, ...]:
    """Which numbers of the states at destinations the model wrote.

    A number may by chance be written as what it was before: of two calls, in which it was a random number
    and NaN, one shows the write. Where a source is its own destination, a layer counts as written whole.
    """
    in_place = [not separate and slot in step.sources for slot in step.slots]
    whole = torch.tensor(in_place, device=usual.kv.device)
    found = []
    for written, states in zip(usual.states_written, surrounded.states, strict=True):
        shape = (*written.shape[:2], *[1] * (written.dim() - 2))
        any_number = written.flatten(2).any(2).view(shape).expand(written.shape)
        marks = whole.view(1, -1, *shape[2:])
        found.append(torch.where(marks, any_number, written | ~states.isnan()))
    return tuple(found)


def _store(inputs: StepInputs, step: StepMemory, outcome: Outcome) -> None:
    """Put what the step names into the engine's pools, where the model wrote it; always finite numbers."""
    pools = inputs.state_pool.tensors
    slots = torch.tensor(step.slots, dtype=torch.int64, device=inputs.kv_cache.device)
    for pool, states, written in zip(pools, outcome.states, outcome.states_written, strict=True):
        numbers = torch.where(written, states.nan_to_num(0, 0, 0), pool.index_select(1, slots))
        pool.index_copy_(1, slots, numbers)
    kv = inputs.kv_cache.flatten(2, 3)
    places = torch.tensor([write.place for write in step.kv_writes], dtype=torch.int64, device=kv.device)
    written = outcome.kv_written[..., None, None]
    numbers = torch.where(written, outcome.kv.nan_to_num(0, 0, 0), kv.index_select(2, places))
    kv.index_copy_(2, places, numbers)
