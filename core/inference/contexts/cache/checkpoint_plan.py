"""At which block boundaries states are stored."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, get_args

from ....validation import INT32_MAX, check_fields, integer, integers, refused, set_field

BoundaryKind = Literal["mark", "tail", "branch", "decode", "step_end", "interval"]
KINDS_BY_WORTH: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
"""The kinds in the order of their worth: where slots run short, the first kinds get slots first."""


class Boundary(NamedTuple):
    """A token position at the end of a block, and why the state there is worth a slot."""

    position: int
    kind: BoundaryKind
    is_kept: bool = False  # a decode state that stays when the request stores its next one


@dataclass(frozen=True)
class CheckpointPlan:
    """Which states to store. Lengths and positions are tokens, rounded down to a block boundary.

    A recurrence cannot be rewound: a state is stored when a step crosses the boundary, or never. A prompt of
    N tokens stores its tail: the deepest boundary that a repeat can resume from (<= N-1), and N where it is a
    boundary. It stores the branch: where it and a cached or waiting prompt differ first, if no state is
    cached there. It stores the ends of its steps that are boundaries. With blocks of 256 tokens, 600 tokens
    that share 300 store the states at 512 and 256; decoding stores 768, then 1024 in its place.

    A plan of one's own is a subclass that overrides `boundaries`; (position, kind) pairs will do.

    Attributes:
        decode: "rolling" keeps the state of the last boundary that decoding crossed. An integer (a multiple
            of the block) also keeps the states at the integer's multiples. "off" stores no state.
        prefill_interval: also store every multiple of this number of prompt tokens (a multiple of the block).
        marks: also store these prompt positions (for example where a system prompt ends).
    """

    decode: Literal["rolling", "off"] | int = "rolling"
    prefill_interval: int | None = None
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.decode, str) or self.decode not in ("rolling", "off"):
            check_fields(self, integer, decode=(1, INT32_MAX, "'rolling' or 'off'"))
        check_fields(self, integer, or_none=True, prefill_interval=(1, INT32_MAX))
        set_field(self, "marks", tuple(integers("marks", self.marks, 0, INT32_MAX)))

    @classmethod
    def every_block(cls, block_size_tokens: int) -> "CheckpointPlan":
        """A plan that stores the state at every block boundary of prompts and answers."""
        every = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        return cls(decode=every, prefill_interval=every)

    def with_marks(self, marks: Iterable[int]) -> Self:
        """This plan, which also stores the states at these prompt positions."""
        return replace(self, marks=(*self.marks, *marks))

    def check_block_size(self, block_size_tokens: int) -> None:
        """Raise a ValueError unless the intervals are multiples of the block."""
        integer("block_size_tokens", block_size_tokens, 1)
        for name, interval in (("decode", self.decode), ("prefill_interval", self.prefill_interval)):
            if isinstance(interval, int) and interval % block_size_tokens:
                raise refused(name, interval, f"a multiple of block_size_tokens ({block_size_tokens})")

    def boundaries(
        self, *, start: int, stop: int, prompt_tokens: int, block_size_tokens: int, branch_tokens: int = 0
    ) -> tuple[Boundary, ...]:
        """The boundaries in (start, stop] to store in the step that computes tokens [start, stop).

        Args:
            start, stop: the tokens of the step. A step that starts before `prompt_tokens` is a prefill,
                another step is a decode.
            prompt_tokens: where prefill ends and decoding begins.
            block_size_tokens: tokens of a block.
            branch_tokens: leading tokens that the sequence shares with an earlier or waiting one before the
                two differ; 0 where it only continues or repeats one.

        Returns:
            One boundary for each position, of the position's worthiest kind; the worthiest kinds first. With
                blocks of 256, tokens [0, 600) of a prompt of 600 that shares 300 tokens: 512 as "tail", 256
                as "branch".
        """
        start, stop = integer("start", start, 0), integer("stop", stop, 0)
        prompt_tokens = integer("prompt_tokens", prompt_tokens, 0)
        block_size_tokens = integer("block_size_tokens", block_size_tokens, 1)
        branch_tokens = integer("branch_tokens", branch_tokens, 0)
        first: dict[int, Boundary] = {}
        planned = self._planned(start, stop, prompt_tokens, block_size_tokens, branch_tokens)
        for position, kind in sorted(planned, key=lambda place: KINDS_BY_WORTH.index(place[1])):
            position -= position % block_size_tokens
            if start < position <= stop:
                is_kept = kind == "decode" and isinstance(self.decode, int) and position % self.decode == 0
                first.setdefault(position, Boundary(position, kind, is_kept))
        return tuple(first.values())

    def _planned(
        self, start: int, stop: int, prompt: int, block: int, branch: int
    ) -> Iterator[tuple[int, BoundaryKind]]:
        if start >= prompt:
            if self.decode != "off":
                yield from ((p, "decode") for p in range(start - start % block + block, stop + 1, block))
            return
        yield from ((p, "mark") for p in self.marks)
        yield prompt - 1, "tail"
        yield prompt, "tail"
        yield branch, "branch"
        if stop % block == 0:
            yield stop, "step_end"
        if self.prefill_interval is not None:
            step = self.prefill_interval
            yield from ((p, "interval") for p in range(start - start % step + step, stop + 1, step))


def checked_boundaries(
    plan: CheckpointPlan, start: int, stop: int, prompt: int, block: int, branch: int
) -> tuple[Boundary, ...]:
    """What `plan.boundaries` returns, checked where the plan is one of a user's own; lengths in tokens."""
    boundaries = plan.boundaries(
        start=start, stop=stop, prompt_tokens=prompt, block_size_tokens=block, branch_tokens=branch
    )
    if type(plan) is CheckpointPlan:
        return boundaries
    boundaries = tuple(Boundary(*boundary) for boundary in boundaries)
    positions = {boundary.position for boundary in boundaries if boundary.kind in KINDS_BY_WORTH}
    inside = all(start < position <= stop and position % block == 0 for position in positions)
    if not inside or len(positions) < len(boundaries):
        multiples = f"distinct multiples of {block} in ({start}, {stop}]"
        accepted = f"{multiples}, each with a kind of {', '.join(KINDS_BY_WORTH)}"
        raise refused("checkpoint_plan.boundaries", boundaries, accepted)
    return boundaries


MAX_COMPARED = 32  # waiting requests with which one that begins is compared


def best_shared_depth(hashes: Sequence[int], prompts: Iterable[Sequence[int]], num_known: int) -> int:
    """After how many blocks of `hashes` a state saves `prompts` the most blocks; 0 where it saves none.

    `num_known` blocks are saved without it. Example: of hashes [a b c] and prompts [[a b x], [a b y], [a z]],
    2: a state after b saves two of them 2 blocks each, one after a would save three of them 1 block each.
    """
    depth = saved = 0
    prefix_hash = hashes[num_known] if num_known < len(hashes) else None
    deeper = [prompt for prompt in prompts if len(prompt) > num_known and prompt[num_known] == prefix_hash]
    shared = sorted((_num_shared(hashes, prompt) for prompt in deeper), reverse=True)
    for count, num_shared in enumerate(shared, 1):
        if (num_shared - num_known) * count > saved:
            depth, saved = num_shared, (num_shared - num_known) * count
    return depth


def _num_shared(hashes: Sequence[int], prompt: Sequence[int]) -> int:
    """Leading blocks that two sequences have in common; a hash stands for all blocks up to its own."""
    return bisect_left(range(min(len(hashes), len(prompt))), True, key=lambda i: hashes[i] != prompt[i])
