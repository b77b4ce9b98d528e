"""A checkpoint plan whose default parts can be switched off, so that a test sees the others alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from mambaslots.inference.contexts.cache.checkpoint_plan import BoundaryKind, CheckpointPlan


@dataclass(frozen=True)
class SwitchedPlan(CheckpointPlan):
    """`CheckpointPlan` without tails, without branches or without the ends of steps."""

    tail: bool = True
    branch: bool = True
    step_ends: bool = True

    def _planned(
        self, start: int, stop: int, prompt: int, block: int, branch: int
    ) -> Iterator[tuple[int, BoundaryKind]]:
        stores = {"tail": self.tail, "branch": self.branch, "step_end": self.step_ends}
        planned = super()._planned(start, stop, prompt, block, branch)
        return (place for place in planned if stores.get(place[1], True))
