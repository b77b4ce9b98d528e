"""What a model's results depend on: its sources, as they must, and other memory, as they must not."""

from collections import Counter
from dataclasses import replace

from .differences import outcome_difference
from .memory_stage import Fill, Outcome, Region
from .report import Findings
from .rules import Rule
from .trial import Trial
from .write_record import WriteRecord

_ATTEMPTS = 6
Part = tuple[bool, int, int]
"""Whether rows decode, the index of the state tensor, the layer."""


class SourceProbes:
    """Alters the sources of a step, one tensor of one layer at a time, until each is seen to matter."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._read: set[Part] = set()
        self._unread: Counter[Part] = Counter()

    def run(self, trial: Trial, usual: Outcome) -> int:
        """Probe what is not known to be read; returns how many calls that took."""
        calls = 0
        for decode in (True, False):
            sources = sorted({row.source for row in trial.step.rows if row.decode is decode} - {-1})
            if not sources:
                continue
            for tensor in range(len(usual.states)):
                for layer in range(usual.states[tensor].shape[0]):
                    part = decode, tensor, layer
                    if part in self._read or self._unread[part] >= _ATTEMPTS:
                        continue
                    calls += 1
                    if _matters(trial, usual, Fill(disturbed=(tensor, layer, sources)), self._tolerance):
                        self._read.add(part)
                    else:
                        self._unread[part] += 1
        return calls

    def judge(self, findings: Findings, writes: WriteRecord) -> None:
        """Add a finding where a state that is written never mattered."""
        ignored = [
            part
            for part in sorted(self._unread, reverse=True)
            if part not in self._read and writes.carries_information(*part[1:])
        ]
        if ignored:
            named = ", ".join(
                f"{writes.states[tensor].name!r} of layer {layer} in {'decode' if decode else 'prefill'} rows"
                for decode, tensor, layer in ignored
            )
            findings.add(Rule.SOURCES_IGNORED, f"what state_sources name has no effect: {named}")


def explain_dependence(
    findings: Findings, trial: Trial, usual: Outcome, fill: Fill, tolerance: float, where: str
) -> None:
    """Find the memory that a step depends on, and should not.

    Args:
        usual: what the step computed where memory was filled as `fill` says.
        fill: without NaN; each region is filled with NaN in turn.
    """
    if _matters(trial, usual, fill, tolerance):
        findings.add(
            Rule.NOT_DETERMINISTIC, "the same call computes something else when it is repeated", where
        )
        return
    guilty: dict[Region, bool] = {}
    for region in Region:
        if _matters(trial, usual, replace(fill, nan=frozenset({region})), tolerance):
            reseeded = replace(fill, reseeded=frozenset({region}))
            guilty[region] = _matters(trial, usual, reseeded, tolerance)
    if Region.DESTINATIONS in guilty:
        if trial.step.sources and not _reads_any_source(trial, usual, fill, tolerance):
            findings.add(
                Rule.SOURCES_IGNORED,
                "rows begin with what their destinations held before, not with the states of state_sources",
                where,
            )
        else:
            findings.add(Rule.DESTINATION_READ, _dependence(guilty, Region.DESTINATIONS), where)
    if Region.OTHER_SLOTS in guilty or not guilty:
        findings.add(Rule.FREE_STATE_READ, _dependence(guilty, Region.OTHER_SLOTS), where)
    kv = [region for region in (Region.KV_WRITES, Region.KV_TAILS, Region.OTHER_KV) if region in guilty]
    if kv:
        findings.add(Rule.FREE_KV_READ, "; ".join(_dependence(guilty, region) for region in kv), where)


def _dependence(guilty: dict[Region, bool], region: Region) -> str:
    if guilty.get(region, True):
        return f"results depend on {region}"
    return f"results are lost where NaN is in {region} (other numbers there do not matter)"


def _matters(trial: Trial, usual: Outcome, fill: Fill, tolerance: float) -> bool:
    outcome = trial.attempt(fill)
    return outcome is None or outcome_difference(usual, outcome, trial.num_logits) > tolerance


def _reads_any_source(trial: Trial, usual: Outcome, fill: Fill, tolerance: float) -> bool:
    return any(
        _matters(trial, usual, replace(fill, disturbed=(tensor, layer, trial.step.sources)), tolerance)
        for tensor in range(len(usual.states))
        for layer in range(usual.states[tensor].shape[0])
    )
