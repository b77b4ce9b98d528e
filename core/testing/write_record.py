"""Which numbers of its state a model writes, over all destinations of a check."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..state_tensor import StateTensor
from .memory_stage import Outcome
from .report import Findings
from .rules import Rule
from .step_memory import StateWrite, WriteKind

_RULES = {
    WriteKind.DECODE: Rule.DECODE_STATE_NOT_WRITTEN,
    WriteKind.PREFILL: Rule.PREFILL_STATE_NOT_WRITTEN,
}


@dataclass
class _Coverage:
    """Of one kind of destination and one tensor: what every destination got so far."""

    always: Tensor
    where: str


@dataclass
class WriteRecord:
    """Learns from a model's writes what its states consist of: what it writes once, it must always write.

    Tensors are named by their index in `states`, as the model declares them.
    """

    states: tuple[StateTensor, ...]
    _used: dict[int, Tensor] = field(default_factory=dict)
    _first: dict[int, Tensor] = field(default_factory=dict)
    _varies: dict[int, Tensor] = field(default_factory=dict)
    _coverage: dict[tuple[WriteKind, int], _Coverage] = field(default_factory=dict)

    def add(self, writes: tuple[StateWrite, ...], outcome: Outcome, where: str) -> None:
        """Note what one call wrote at each destination."""
        for index, write in enumerate(writes):
            for tensor in range(len(self.states)):
                written = outcome.states_written[tensor][:, index]
                self._note(write.kind, tensor, written, f"{where}, the state after {write.position} tokens")
                self._note_values(tensor, written, outcome.states[tensor][:, index])

    def _note(self, kind: WriteKind, tensor: int, written: Tensor, where: str) -> None:
        used = self._used.get(tensor)
        self._used[tensor] = written.clone() if used is None else used | written
        known = self._coverage.get((kind, tensor))
        if known is None:
            self._coverage[kind, tensor] = _Coverage(written.clone(), where)
            return
        always = known.always & written
        if not torch.equal(always, known.always):
            known.always, known.where = always, where

    def _note_values(self, tensor: int, written: Tensor, values: Tensor) -> None:
        values = values.masked_fill(~written, 0)
        first, varies = self._first.get(tensor), self._varies.get(tensor)
        if first is None or varies is None:
            if written.any():
                self._first[tensor] = values
                self._varies[tensor] = torch.zeros(len(values), dtype=torch.bool, device=values.device)
            return
        self._varies[tensor] = varies | ((values != first) & written).flatten(1).any(1)

    def carries_information(self, tensor: int, layer: int) -> bool:
        """Whether different values were ever written to a layer's tensor."""
        varies = self._varies.get(tensor)
        return varies is not None and bool(varies[layer])

    def judge(self, findings: Findings) -> None:
        """Add a finding for every kind of destination that does not get all of a state."""
        for tensor, used in self._used.items():
            idle = [str(layer) for layer, written in enumerate(used) if not written.any()]
            if idle:
                name, num_layers = self.states[tensor].name, self.states[tensor].num_layers
                findings.add(
                    Rule.NO_STATE_WRITTEN,
                    f"{name!r} has {num_layers} layers, and no step writes layer {', '.join(idle)}",
                )
        for (kind, tensor), known in self._coverage.items():
            used = self._used[tensor]
            missing = used & ~known.always
            if missing.any():
                state = self.states[tensor]
                inner = Rule.CHUNK_STATE_NOT_WRITTEN if state.grid > 1 else Rule.WINDOW_NOT_WRITTEN
                at = [str(layer) for layer, part in enumerate(missing) if part.any()]
                findings.add(
                    _RULES.get(kind, inner),
                    f"{int(missing.sum())} of {int(used.sum())} numbers of {state.name!r} are not written at "
                    f"{kind}, in layer {', '.join(at)}",
                    known.where,
                )
