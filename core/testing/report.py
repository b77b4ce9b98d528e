"""What a check of a model found."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from .rules import Rule


@dataclass(frozen=True)
class Finding:
    """A rule that the model breaks.

    Attributes:
        rule: which one; `rule.fix` says what to do.
        message: what was seen, at the first place where it was seen.
        where: that place.
        count: how many calls of the model showed it.
    """

    rule: Rule
    message: str
    where: str = ""
    count: int = 1

    def __str__(self) -> str:
        place = f" (first in {self.where})" if self.where else ""
        times = f" Seen in {self.count} calls." if self.count > 1 else ""
        return f"{self.rule.upper()}: {self.message}{place}.{times} {self.rule.fix}"


@dataclass(frozen=True)
class ScenarioReport:
    """One way of serving the same texts.

    Attributes:
        name: what is compared.
        num_steps: steps of the engine.
        num_compared: tokens whose logits, KV or state were held against those of the other ways.
        largest_difference: relative to the largest number of what is compared.
        skipped: why nothing was compared; empty where it was.
    """

    name: str
    num_steps: int = 0
    num_compared: int = 0
    largest_difference: float = 0.0
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name:<34}{self.num_steps:>5} steps  not compared: {self.skipped}"
        return (
            f"{self.name:<34}{self.num_steps:>5} steps {self.num_compared:>6} compared"
            f"   largest difference {self.largest_difference:.1e}"
        )


@dataclass(frozen=True)
class ModelReport:
    """The result of `check_model`; `print` it.

    Attributes:
        model: the name of its class.
        findings: in the order of `Rule`, one a rule.
        scenarios: what was served.
        tolerance: the largest relative difference that was accepted.
        reached: how often the check exercised each part of the protocol.
        num_calls: calls of the model.
        seconds: how long the check took.
    """

    model: str
    findings: tuple[Finding, ...] = ()
    scenarios: tuple[ScenarioReport, ...] = ()
    tolerance: float = 0.0
    reached: Mapping[str, int] = field(default_factory=dict)
    num_calls: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        verdict = "keeps all rules" if self.passed else f"breaks {len(self.findings)} rules"
        if len(self.findings) == 1:
            verdict = "breaks 1 rule"
        lines = [f"{self.model} {verdict} ({self.num_calls} calls, {self.seconds:.1f} s)"]
        lines += [f"  {number}. {finding}" for number, finding in enumerate(self.findings, start=1)]
        if self.scenarios:
            lines.append(f"Accepted difference: {self.tolerance:.0e}")
        lines += [f"  {scenario}" for scenario in self.scenarios]
        if self.reached:
            reached = ", ".join(f"{count} {what}" for what, count in self.reached.items())
            lines += textwrap.wrap(f"Reached: {reached}", 100, subsequent_indent="  ")
        return "\n".join(lines)


class ModelError(AssertionError):
    """The model breaks rules; the message is the printed report, `report` the report."""

    def __init__(self, report: ModelReport) -> None:
        super().__init__(str(report))
        self.report = report


class Findings:
    """Collects findings, one a rule."""

    def __init__(self) -> None:
        self._found: dict[Rule, Finding] = {}

    def add(self, rule: Rule, message: str, where: str = "") -> None:
        """Note a broken rule; of a rule noted before, only the count grows."""
        known = self._found.get(rule)
        if known is None:
            self._found[rule] = Finding(rule, message, where)
        else:
            self._found[rule] = Finding(rule, known.message, known.where, known.count + 1)

    def __contains__(self, rule: Rule) -> bool:
        return rule in self._found

    @property
    def rules(self) -> set[Rule]:
        """The rules that are broken, whatever explains them."""
        return set(self._found)

    def listed(self) -> tuple[Finding, ...]:
        """In the order of `Rule`, without those that others explain; padding comes when all else is well."""
        explained = {rule for cause in self._found for rule in _CONSEQUENCES.get(cause, ())}
        if len(self._found) > 1:
            explained.add(Rule.PADDING_DIFFERS)
        return tuple(self._found[rule] for rule in Rule if rule in self._found and rule not in explained)


_NOT_WRITTEN = (
    Rule.DECODE_STATE_NOT_WRITTEN, Rule.PREFILL_STATE_NOT_WRITTEN, Rule.CHUNK_STATE_NOT_WRITTEN,
    Rule.WINDOW_NOT_WRITTEN,
)  # fmt: skip
_READS = (
    Rule.SOURCES_IGNORED, Rule.NO_SOURCE_NOT_ZEROS, Rule.DESTINATION_READ, Rule.FREE_STATE_READ,
    Rule.FREE_KV_READ, Rule.IN_PLACE_DIFFERS,
)  # fmt: skip
_CONSEQUENCES: dict[Rule, tuple[Rule, ...]] = {
    Rule.NOT_DETERMINISTIC: _READS,
    Rule.FOREIGN_SLOT_WRITTEN: (Rule.SOURCE_WRITTEN, Rule.PADDING_SLOT_WRITTEN, Rule.SOURCES_IGNORED),
    Rule.KV_NOT_WRITTEN: (Rule.FREE_KV_READ,),
    Rule.KV_MISPLACED: (Rule.FREE_KV_READ,),
    Rule.SOURCES_IGNORED: (Rule.NO_SOURCE_NOT_ZEROS, Rule.DESTINATION_READ),
    Rule.FREE_STATE_READ: (Rule.DESTINATION_READ,),
    Rule.DESTINATION_READ: _NOT_WRITTEN,
}
"""What else seems to be broken where one rule is."""
