"""A prompt, and where conversations that begin like it branch."""

from dataclasses import dataclass

from ..validation import brief_repr


@dataclass(frozen=True)
class MarkedPrompt:
    """The tokens of a chat and the positions that are worth a state.

    Attributes:
        tokens: token ids of the prompt.
        marks: for `CheckpointPlan(marks=...)`: positions in `tokens`, from 1 to their number, the worthiest
            first. Where slots run short, the first marks get them.
    """

    tokens: list[int]
    marks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return brief_repr(self)
