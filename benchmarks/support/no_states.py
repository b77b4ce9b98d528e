"""A plan for prompts whose states cost nothing, because none is stored."""

import mambaslots as ms


class NoStates(ms.CheckpointPlan):
    """Stores no state."""

    def boundaries(self, **step: int) -> tuple[()]:  # type: ignore[override]
        return ()
