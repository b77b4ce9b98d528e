"""At which block boundaries a request's state is taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ...validation import INT32_MAX, boolean, integer, integers, optional_integer

BoundaryKind = Literal["mark", "tail", "branch", "decode", "chunk_end", "interval"]
KINDS_BY_WORTH: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
"""Where slots run short, the first kinds are served first."""


class Boundary(NamedTuple):
    """A token position that ends a block, and why the state there is worth a slot."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True)
class CheckpointPlan:
    """Which states to take. Lengths and positions are tokens, rounded down to a block boundary.

    A recurrence cannot be rewound: the state at a boundary is taken when it is crossed, or never.

    Attributes:
        tail: the deepest boundary that a repeat of the prompt can resume from (<= N-1 for N prompt
            tokens), and N itself when it is a boundary, which an extension resumes from.
        branch: where the prompt leaves what was seen before, if no state was cached there.
        chunk_ends: the end of a prefill chunk, when it is a boundary.
        decode: "rolling" keeps the state of the last boundary crossed while decoding; an integer (a
            multiple of the block) also keeps those at its multiples; "off" takes none.
        prefill_interval: also every so many prompt tokens (a multiple of the block).
        offsets_from_start, offsets_from_end: also these distances from the prompt's two ends, within it.
        marks: also these prompt positions (for example where a system prompt ends).
        max_states_per_path: cap on the cached states of one request's path; the shallowest go first;
            the request's deepest state, forks and pinned states are exempt.
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

    def __post_init__(self) -> None:
        for name in ("tail", "branch", "chunk_ends"):
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
        """The state at every block boundary, of prompts and of answers."""
        every = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        return cls(decode=every, prefill_interval=every)

    def check_useful(self) -> None:
        """Raise a ValueError if this plan takes no state at all."""
        takes = (
            self.tail, self.branch, self.chunk_ends, self.decode != "off", self.prefill_interval,
            self.offsets_from_start, self.offsets_from_end, self.marks,
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
        self, *, start: int, stop: int, prompt_tokens: int, block_size_tokens: int, seen_tokens: int = 0
    ) -> tuple[Boundary, ...]:
        """The boundaries in (start, stop] to take in the step that computes tokens [start, stop).

        `prompt_tokens`: where prefill ends and decoding begins; a step is one or the other, told by
        `start`. `seen_tokens`: how far the sequence follows one seen before (KV matched, or evicted since).
        Each position appears once, for its worthiest kind, in order of worth.
        """
        start, stop = integer("start", start, 0), integer("stop", stop, 0)
        prompt_tokens = integer("prompt_tokens", prompt_tokens, 0)
        block_size_tokens = integer("block_size_tokens", block_size_tokens, 1)
        seen_tokens = integer("seen_tokens", seen_tokens, 0)
        first: dict[int, BoundaryKind] = {}
        wanted = self._wanted(start, stop, prompt_tokens, block_size_tokens, seen_tokens)
        for position, kind in sorted(wanted, key=lambda boundary: KINDS_BY_WORTH.index(boundary.kind)):
            boundary = position - position % block_size_tokens
            if start < boundary <= stop:
                first.setdefault(boundary, kind)
        return tuple(Boundary(position, kind) for position, kind in first.items())

    def keeps_decode_state(self, position: int) -> bool:
        """Whether the state a request took at `position` while decoding outlives its next one."""
        return isinstance(self.decode, int) and integer("position", position, 0) % self.decode == 0

    def _wanted(self, start: int, stop: int, prompt: int, block: int, seen: int) -> Iterator[Boundary]:
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
        if self.chunk_ends and stop % block == 0:
            yield Boundary(stop, "chunk_end")
        if self.prefill_interval is not None:
            step = self.prefill_interval
            yield from (Boundary(p, "interval") for p in range(start - start % step + step, stop + 1, step))
