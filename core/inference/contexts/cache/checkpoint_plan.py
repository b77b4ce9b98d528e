"""At which block boundaries a request's state is taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ....validation import INT32_MAX, boolean, integer, integers, optional_integer

BoundaryKind = Literal["mark", "tail", "branch", "decode", "chunk_end", "interval"]
KINDS_BY_WORTH: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
"""The kinds in the order of their worth: where slots run short, the first kinds get slots first."""


class Boundary(NamedTuple):
    """A token position at the end of a block, and why the state there is worth a slot."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True)
class CheckpointPlan:
    """Which states to take. Lengths and positions are tokens, rounded down to a block boundary.

    A recurrence cannot be rewound: a state is taken when a step crosses the boundary, or never.

    Attributes:
        tail: take the deepest boundary that a repeat of the prompt can resume from (<= N-1 for N prompt
            tokens). Also take N itself where N is a boundary: longer prompts resume there.
        branch: take the boundary where the prompt leaves what was seen before, if no state is cached there.
        chunk_ends: take the end of a prefill step, where the end is a boundary.
        decode: "rolling" keeps the state of the last boundary that decoding crossed. An integer (a multiple
            of the block) also keeps the states at the integer's multiples. "off" takes no state.
        prefill_interval: also take every multiple of this number of prompt tokens (a multiple of the block).
        offsets_from_start, offsets_from_end: also take the positions at these distances from the start and
            from the end of the prompt.
        marks: also take these prompt positions (for example where a system prompt ends).
        max_states_per_path: maximum number of cached states of one request's path. The shallowest states go
            first. The request's deepest state, forks and pinned states are exempt.
        learned: instead of `chunk_ends`, take the boundaries inside a prompt where later prompts are expected
            to part from the prompt, as earlier ones have parted; see `PartingDepths`. Hosts that have no such
            counts take `chunk_ends`.
    """

    tail: bool = True
    branch: bool = True
    chunk_ends: bool = True
    decode: Literal["rolling", "off"] | int = "rolling"
    prefill_interval: int | None = None
    offsets_from_start: tuple[int, ...] = ()
    offsets_from_end: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    max_states_per_path: int | None = None
    learned: bool = False

    def __post_init__(self) -> None:
        for name in ("tail", "branch", "chunk_ends", "learned"):
            boolean(name, getattr(self, name))
        if not isinstance(self.decode, str) or self.decode not in ("rolling", "off"):
            every = integer("decode", self.decode, 1, INT32_MAX, also="'rolling' or 'off'")
            object.__setattr__(self, "decode", every)
        for name in ("prefill_interval", "max_states_per_path"):
            object.__setattr__(self, name, optional_integer(name, getattr(self, name), 1, INT32_MAX))
        for name in ("offsets_from_start", "offsets_from_end", "marks"):
            object.__setattr__(self, name, tuple(integers(name, getattr(self, name), 0, INT32_MAX)))

    @classmethod
    def every_block(cls, block_size_tokens: int) -> "CheckpointPlan":
        """A plan that takes the state at every block boundary of prompts and answers."""
        every = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        return cls(decode=every, prefill_interval=every)

    def check_useful(self) -> None:
        """Raise a ValueError if this plan takes no state."""
        takes = (
            self.tail, self.branch, self.chunk_ends, self.learned, self.decode != "off",
            self.prefill_interval, self.offsets_from_start, self.offsets_from_end, self.marks,
        )  # fmt: skip
        if not any(takes):
            raise ValueError(
                f"checkpoint_plan is {self}; accepted: at least one of its parts on, because a cache that "
                "takes no state can resume nothing (enable_prefix_caching=False turns it off)"
            )

    def check_block_size(self, block_size_tokens: int) -> None:
        """Raise a ValueError unless the intervals are multiples of the block."""
        integer("block_size_tokens", block_size_tokens, 1)
        for name, interval in (("decode", self.decode), ("prefill_interval", self.prefill_interval)):
            if isinstance(interval, int) and interval % block_size_tokens:
                raise ValueError(
                    f"{name} is {interval}; accepted: a multiple of block_size_tokens ({block_size_tokens})"
                )

    def boundaries(
        self,
        *,
        start: int,
        stop: int,
        prompt_tokens: int,
        block_size_tokens: int,
        seen_tokens: int = 0,
        parting_tokens: Sequence[int] | None = None,
    ) -> tuple[Boundary, ...]:
        """The boundaries in (start, stop] to take in the step that computes tokens [start, stop).

        Args:
            start, stop: the tokens of the step. A step that starts before `prompt_tokens` is a prefill,
                another step is a decode.
            prompt_tokens: where prefill ends and decoding begins.
            block_size_tokens: tokens of a block.
            seen_tokens: how far the sequence follows one that was seen before: leading tokens whose KV is
                cached, or was cached and is evicted now.
            parting_tokens: where later prompts are expected to part, for `learned`; None where nobody counts.

        Returns:
            One boundary for each position, of the position's worthiest kind; the worthiest kinds first.
        """
        start, stop = integer("start", start, 0), integer("stop", stop, 0)
        prompt_tokens = integer("prompt_tokens", prompt_tokens, 0)
        block_size_tokens = integer("block_size_tokens", block_size_tokens, 1)
        seen_tokens = integer("seen_tokens", seen_tokens, 0)
        first: dict[int, BoundaryKind] = {}
        planned = self._planned(start, stop, prompt_tokens, block_size_tokens, seen_tokens, parting_tokens)
        for position, kind in sorted(planned, key=lambda boundary: KINDS_BY_WORTH.index(boundary.kind)):
            boundary = position - position % block_size_tokens
            if start < boundary <= stop:
                first.setdefault(boundary, kind)
        return tuple(Boundary(position, kind) for position, kind in first.items())

    def keeps_decode_state(self, position: int) -> bool:
        """Whether a decode state at `position` stays when the request takes its next decode state."""
        return isinstance(self.decode, int) and integer("position", position, 0) % self.decode == 0

    def _planned(
        self, start: int, stop: int, prompt: int, block: int, seen: int, parting: Sequence[int] | None
    ) -> Iterator[Boundary]:
        if start >= prompt:
            if self.decode != "off":
                yield from (
                    Boundary(p, "decode") for p in range(start - start % block + block, stop + 1, block)
                )
            return
        yield from (Boundary(p, "mark") for p in self.marks)
        yield from (Boundary(p, "mark") for p in self.offsets_from_start)
        yield from (Boundary(prompt - p, "mark") for p in self.offsets_from_end)
        if self.tail:
            yield Boundary(prompt - 1, "tail")
            yield Boundary(prompt, "tail")
        if self.branch:
            yield Boundary(seen, "branch")
        if self.learned and parting is not None:
            yield from (Boundary(p, "interval") for p in parting)
        elif (self.chunk_ends or self.learned) and stop % block == 0:
            yield Boundary(stop, "chunk_end")
        if self.prefill_interval is not None:
            step = self.prefill_interval
            yield from (Boundary(p, "interval") for p in range(start - start % step + step, stop + 1, step))
