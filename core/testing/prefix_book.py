"""What a model computed for each prefix, held against what it computed for the same prefix in other ways."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from ..state_tensor import StateTensor
from .differences import largest_difference
from .report import Findings
from .rules import Rule
from .step_memory import WriteKind

_STATE_RULES = {WriteKind.DECODE: Rule.DECODE_STATE_WRONG, WriteKind.PREFILL: Rule.PREFILL_STATE_WRONG}


@dataclass(frozen=True)
class Observation:
    """What one call computed for one prefix: logits and KV of its last token, or the state after it.

    Attributes:
        step: the number of the step.
        where: the step, in words.
        kind: "logits", "kv", or where a state was written.
        prefix: the tokens.
        tensors: logits [vocabulary]; KV [layers, 2, kv heads, head dim]; or the tensors of a state,
            each [layers, *shape].
        written: which numbers count; empty for all.
    """

    step: int
    where: str
    kind: str
    prefix: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    written: tuple[Tensor, ...] = ()

    @property
    def is_state(self) -> bool:
        return self.kind not in ("logits", "kv")

    @property
    def about(self) -> str:
        """States after the same tokens are comparable, wherever they were written."""
        return "state" if self.is_state else self.kind

    def differences(self, reference: "Observation") -> list[float]:
        """Of each tensor."""
        found = []
        for index, (ours, theirs) in enumerate(zip(reference.tensors, self.tensors, strict=True)):
            where = None
            if self.written and reference.written:
                where = self.written[index] & reference.written[index]
            groups = 1 if self.about == "logits" else ours.shape[0]
            if self.about == "kv":
                groups = ours.shape[0] * ours.shape[1]
            found.append(largest_difference(ours, theirs, where, groups))
        return found


@dataclass(frozen=True)
class _Mismatch:
    observation: Observation
    reference: Observation
    differences: list[float]


@dataclass
class Comparison:
    """The result of one `PrefixBook.compare`."""

    num_compared: int = 0
    largest_difference: float = 0.0
    failed: bool = False


@dataclass
class PrefixBook:
    """The first observation of a prefix is the reference of all later ones. `states`: as declared."""

    tolerance: float
    states: tuple[StateTensor, ...]
    _known: dict[tuple[str, tuple[int, ...]], Observation] = field(default_factory=dict)

    def compare(self, observations: Iterable[Observation], rule: Rule, findings: Findings) -> Comparison:
        """Hold observations against those before, step by step, up to the first step that differs.

        What nothing is known of becomes a reference. `rule`: the one that is broken where no narrower one is.
        """
        result = Comparison()
        for _, group in groupby(observations, key=lambda observation: observation.step):
            mismatches = []
            for observation in group:
                reference = self._known.setdefault((observation.about, observation.prefix), observation)
                if reference is observation:
                    continue
                differences = observation.differences(reference)
                result.num_compared += 1
                if max(differences) > self.tolerance:
                    mismatches.append(_Mismatch(observation, reference, differences))
                else:
                    result.largest_difference = max(result.largest_difference, *differences)
            if mismatches:
                result.failed = True
                self._explain(mismatches, rule, findings)
                return result
        return result

    def forget_states(self) -> None:
        """Take no state as a reference any more."""
        self._known = {key: known for key, known in self._known.items() if not known.is_state}

    def _explain(self, mismatches: list[_Mismatch], rule: Rule, findings: Findings) -> None:
        """Add the finding that says most about what one step computed wrongly."""
        by_kind: dict[str, _Mismatch] = {}
        for mismatch in mismatches:
            by_kind.setdefault(mismatch.observation.about, mismatch)
        for about, what, twin_rule in (
            ("logits", "logits", Rule.LOGITS_OF_OTHER_TOKENS),
            ("kv", "keys and values", Rule.KV_WRONG),
        ):
            if about not in by_kind:
                continue
            observation = by_kind[about].observation
            twin = self._twin(observation)
            if twin is not None:
                position, other = len(observation.prefix) - 1, len(twin.prefix) - 1
                message = f"the {what} of the token at position {position} are those of the token at {other}"
                findings.add(twin_rule, message, observation.where)
                return
        if "logits" in by_kind:
            findings.add(
                rule, _describe(by_kind["logits"], "logits after {} tokens"), mismatches[0].observation.where
            )
        elif "kv" in by_kind:
            message = _describe(by_kind["kv"], "keys and values of token {}")
            findings.add(Rule.KV_WRONG, message, mismatches[0].observation.where)
        else:
            for mismatch in mismatches:
                self._explain_state(mismatch, findings)

    def _explain_state(self, mismatch: _Mismatch, findings: Findings) -> None:
        observation = mismatch.observation
        twin = self._twin(observation)
        for state, difference in zip(self.states, mismatch.differences, strict=True):
            if difference > self.tolerance:
                message = _describe(mismatch, f"states {state.name!r} after {{}} tokens")
                if twin is not None:
                    message += f"; they are the states after {len(twin.prefix)} tokens"
                inner = Rule.CHUNK_STATE_WRONG if state.grid > 1 else Rule.WINDOW_WRONG
                rule = _STATE_RULES.get(WriteKind(observation.kind), inner)
                findings.add(rule, message, observation.where)

    def _twin(self, observation: Observation) -> Observation | None:
        """The reference of another prefix that equals this observation."""
        for (about, prefix), other in self._known.items():
            if (
                about == observation.about
                and prefix != observation.prefix
                and max(observation.differences(other)) <= self.tolerance
            ):
                return other
        return None


def _describe(mismatch: _Mismatch, what: str) -> str:
    length = len(mismatch.observation.prefix)
    return (
        f"the {what.format(length)} differ by {max(mismatch.differences):.1e} of the largest number from "
        f"those in {mismatch.reference.where}"
    )
