"""At which block boundaries states are stored, and what a sequence and its step hold for that."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import numpy.typing as npt

from ....validation import INT32_MAX, boolean, integer, integers, optional_integer
from .hashing import PrefixHashChain
from .state_slots import PlannedState, StateSlots

TableRow = npt.NDArray[np.integer[Any]]

BoundaryKind = Literal["mark", "tail", "branch", "decode", "chunk_end", "interval"]
KINDS_BY_WORTH: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
"""The kinds in the order of their worth: where slots run short, the first kinds get slots first."""


class Boundary(NamedTuple):
    """A token position at the end of a block, and why the state there is worth a slot."""

    position: int
    kind: BoundaryKind
    keeps: bool = False  # a decode state that stays when the request stores its next one


@dataclass(frozen=True)
class CheckpointPlan:
    """Which states to store. Lengths and positions are tokens, rounded down to a block boundary.

    A recurrence cannot be rewound: a state is stored when a step crosses the boundary, or never. With blocks
    of 256 tokens, a prompt of 600 tokens stores the state at 512 (`tail`); decoding stores 768, then 1024 in
    its place (`decode="rolling"`).

    A plan of one's own is a subclass that overrides `boundaries`; (position, kind) pairs will do.

    Attributes:
        tail: store the deepest boundary that a repeat of the prompt can resume from (<= N-1 for N prompt
            tokens). Also N itself where N is a boundary: longer prompts resume there.
        branch: store the boundary where the prompt and a cached or waiting one differ first, if no state is
            cached there. Cached or waiting [a b c d], prompt [a b x]: the state after b.
        chunk_ends: store the end of a prefill step, where the end is a boundary.
        decode: "rolling" keeps the state of the last boundary that decoding crossed. An integer (a multiple
            of the block) also keeps the states at the integer's multiples. "off" stores no state.
        prefill_interval: also store every multiple of this number of prompt tokens (a multiple of the block).
        marks: also store these prompt positions (for example where a system prompt ends).
    """

    tail: bool = True
    branch: bool = True
    chunk_ends: bool = True
    decode: Literal["rolling", "off"] | int = "rolling"
    prefill_interval: int | None = None
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tail", "branch", "chunk_ends"):
            boolean(name, getattr(self, name))
        if not isinstance(self.decode, str) or self.decode not in ("rolling", "off"):
            every = integer("decode", self.decode, 1, INT32_MAX, also="'rolling' or 'off'")
            object.__setattr__(self, "decode", every)
        interval = optional_integer("prefill_interval", self.prefill_interval, 1, INT32_MAX)
        object.__setattr__(self, "prefill_interval", interval)
        object.__setattr__(self, "marks", tuple(integers("marks", self.marks, 0, INT32_MAX)))

    @classmethod
    def every_block(cls, block_size_tokens: int) -> "CheckpointPlan":
        """A plan that stores the state at every block boundary of prompts and answers."""
        every = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        return cls(decode=every, prefill_interval=every)

    def with_marks(self, marks: Iterable[int]) -> Self:
        """This plan, which also stores the states at these prompt positions."""
        return replace(self, marks=(*self.marks, *marks))

    def check_useful(self) -> None:
        """Raise a ValueError if this plan stores no state."""
        switches = self.tail, self.branch, self.chunk_ends, self.decode != "off"
        if not any((*switches, self.prefill_interval, self.marks)):
            raise ValueError(
                f"checkpoint_plan is {self}; accepted: at least one of its parts on, because a cache that "
                "stores no state can resume nothing (enable_prefix_caching=False turns it off)"
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
        """The boundaries in (start, stop] to store in the step that computes tokens [start, stop).

        Args:
            start, stop: the tokens of the step. A step that starts before `prompt_tokens` is a prefill,
                another step is a decode.
            prompt_tokens: where prefill ends and decoding begins.
            block_size_tokens: tokens of a block.
            seen_tokens: leading tokens that the sequence shares with an earlier or waiting one before the two
                differ; 0 where it only continues or repeats one.

        Returns:
            One boundary for each position, of the position's worthiest kind; the worthiest kinds first. With
                blocks of 256, tokens [0, 600) of a prompt of 600 that shares 300 tokens: 512 as "tail", 256
                as "branch".
        """
        start, stop = integer("start", start, 0), integer("stop", stop, 0)
        prompt_tokens = integer("prompt_tokens", prompt_tokens, 0)
        block_size_tokens = integer("block_size_tokens", block_size_tokens, 1)
        seen_tokens = integer("seen_tokens", seen_tokens, 0)
        first: dict[int, Boundary] = {}
        planned = self._planned(start, stop, prompt_tokens, block_size_tokens, seen_tokens)
        for position, kind in sorted(planned, key=lambda place: KINDS_BY_WORTH.index(place[1])):
            position -= position % block_size_tokens
            if start < position <= stop:
                keeps = kind == "decode" and isinstance(self.decode, int) and position % self.decode == 0
                first.setdefault(position, Boundary(position, kind, keeps))
        return tuple(first.values())

    def _planned(
        self, start: int, stop: int, prompt: int, block: int, seen: int
    ) -> Iterator[tuple[int, BoundaryKind]]:
        if start >= prompt:
            if self.decode != "off":
                yield from ((p, "decode") for p in range(start - start % block + block, stop + 1, block))
            return
        yield from ((p, "mark") for p in self.marks)
        if self.tail:
            yield prompt - 1, "tail"
            yield prompt, "tail"
        if self.branch:
            yield seen, "branch"
        if self.chunk_ends and stop % block == 0:
            yield stop, "chunk_end"
        if self.prefill_interval is not None:
            step = self.prefill_interval
            yield from ((p, "interval") for p in range(start - start % step + step, stop + 1, step))


def checked_boundaries(
    plan: CheckpointPlan, start: int, stop: int, prompt_tokens: int, block_size_tokens: int, seen_tokens: int
) -> tuple[Boundary, ...]:
    """What `plan.boundaries` returns, checked where the plan is one of a user's own."""
    found = plan.boundaries(
        start=start,
        stop=stop,
        prompt_tokens=prompt_tokens,
        block_size_tokens=block_size_tokens,
        seen_tokens=seen_tokens,
    )
    if type(plan) is CheckpointPlan:
        return found
    boundaries = tuple(Boundary(*each) for each in found)
    positions = {each.position for each in boundaries if each.kind in KINDS_BY_WORTH}
    inside = all(start < position <= stop and position % block_size_tokens == 0 for position in positions)
    if not inside or len(positions) < len(boundaries):
        raise ValueError(
            f"checkpoint_plan.boundaries is {boundaries}; accepted: distinct multiples of "
            f"{block_size_tokens} in ({start}, {stop}], each with a kind of {', '.join(KINDS_BY_WORTH)}"
        )
    return boundaries


class CachedPath:
    """The KV blocks of one sequence, and the durable slot of its state; only `PrefixCache` changes it."""

    def __init__(
        self, chain: PrefixHashChain, plan: CheckpointPlan, table_row: TableRow, shares: bool
    ) -> None:
        """`table_row`: [blocks of the longest sequence], all -1. The path writes its `blocks` there."""
        self.chain = chain
        self.plan = plan
        self.shares = shares  # False without caching, and once the cache was reset
        self.blocks: list[int] = []  # each with a reference of this path, as in the block table's row
        self.num_registered = 0  # leading blocks that are complete and never written again
        self.state_slot = -1  # whose state the sequence continues from, pinned; -1: none
        self.rolling_block = -1  # of the newest decode state that rolls, or -1
        self.request = -1  # the eviction policy's number, or -1
        self._table_row = table_row

    def check_fits(self, num_blocks: int) -> None:
        """ValueError where the row of the block table cannot show so many blocks."""
        if num_blocks > len(self._table_row):
            raise ValueError(
                f"table_row has {len(self._table_row)} entries; accepted: at least {num_blocks}, one for "
                "each block that the path will hold"
            )

    def append(self, blocks: list[int]) -> None:
        first = len(self.blocks)
        self.blocks += blocks
        self._table_row[first : first + len(blocks)] = blocks

    def replace(self, first: int, blocks: list[int]) -> None:
        """Put `blocks` in the place of block `first` and all later blocks; O(these blocks)."""
        self._table_row[first : len(self.blocks)] = -1
        del self.blocks[first:]
        self.append(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError where the row of the block table shows other blocks."""
        assert 0 <= self.num_registered <= len(self.blocks), "more blocks are registered than held"
        assert self._table_row[: len(self.blocks)].tolist() == self.blocks, "the block table is off"
        assert (self._table_row[len(self.blocks) :] == -1).all(), "the block table has stale entries"


@dataclass(frozen=True)
class PathStep:
    """Tokens [start, stop) of one sequence, which the next step computes.

    The last tokens may be drafts: guesses at the sequence's next tokens, which the step verifies.

    Attributes:
        path: the sequence's path in the cache.
        sequence: the known tokens of the sequence; drafts are not among them.
        start, stop: token positions.
        decoding: whether the step is a decode; else it is (a part of) a prefill.
        boundaries: where states are to be stored.
        destinations: boundary position -> the slot reserved for its state; `PrefixCache.reserve` fills it.
        drafts: the drafts of a decode.
    """

    path: CachedPath
    sequence: Sequence[int] = field(repr=False, compare=False)
    start: int
    stop: int
    decoding: bool = False
    boundaries: tuple[Boundary, ...] = ()
    destinations: dict[int, int] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()

    def key_at(self, position: int) -> int:
        """The hash of the prefix that ends at block boundary `position` of the tokens and drafts."""
        chain = self.path.chain
        chain.extend_to(self.sequence, position)
        if position > len(self.sequence):  # a fork, so that drafts do not enter the sequence's chain
            chain = chain.fork()
            chain.extend_to([*self.sequence, *self.drafts], position)
        return chain.keys[position // chain.block_size_tokens - 1]

    def block_at(self, position: int) -> int:
        return self.path.blocks[position // self.path.chain.block_size_tokens - 1]

    def accepted(self, num_tokens: int) -> Self:
        """This decode cut to its first `num_tokens` tokens; the others are wrong drafts."""
        stop = self.start + num_tokens
        return replace(
            self,
            stop=stop,
            drafts=self.drafts[: num_tokens - 1],
            boundaries=tuple(boundary for boundary in self.boundaries if boundary.position <= stop),
            destinations={p: slot for p, slot in self.destinations.items() if p <= stop},
        )


class RollingOwner(Protocol):
    """A sequence that decodes; `rolling_block` ends at its newest decode state that rolls, or is -1."""

    rolling_block: int


def drop_rolling(slots: StateSlots, owner: RollingOwner) -> None:
    """Drop the owner's newest decode state that rolls; one that a request has resumed from stays."""
    block = owner.rolling_block
    slot = slots.tree.slot_of(block) if block >= 0 else -1
    if slot < 0 or slot in slots.tree.used or slots.drop(block, "rolled"):
        owner.rolling_block = -1


def make_room_by_rolling(slots: StateSlots, owners: Iterable[RollingOwner], num_slots: int) -> None:
    """Drop decode states of `owners`, which store newer ones now, until `num_slots` slots are free."""
    for owner in owners:
        if len(slots.free) >= num_slots:
            return
        drop_rolling(slots, owner)


def reserve_states[S: PathStep](
    slots: StateSlots, steps: Sequence[S], max_inner_states: int | None = None
) -> list[S]:
    """Reserve a slot for each boundary that has no state yet, as far as slots go; may evict states."""
    certain: dict[int, tuple[int, Boundary]] = {}  # hash -> number of the step, boundary
    guessed: dict[int, tuple[int, Boundary]] = {}
    for number, step in enumerate(steps):
        for boundary in step.boundaries:
            key = step.key_at(boundary.position)
            if key not in slots.tree.state_block_of_hash:
                known = boundary.position <= len(step.sequence)
                (certain if known else guessed).setdefault(key, (number, boundary))
    if not (certain or guessed):
        return list(steps)
    wanted = sorted(certain, key=lambda key: KINDS_BY_WORTH.index(certain[key][1].kind))
    beyond: list[int] = []
    if max_inner_states is not None:
        inner = [key for key in wanted if _is_inner(steps[certain[key][0]], certain[key][1])]
        beyond = inner[max_inner_states:]
        dropped = set(beyond)
        wanted = [key for key in wanted if key not in dropped]
    if not slots.policy.refuses:
        decoding = [steps[certain[key][0]].path for key in wanted if certain[key][1].kind == "decode"]
        make_room_by_rolling(slots, decoding, len(wanted))
    chosen = slots.make_room([_planned(steps[certain[key][0]], certain[key][1]) for key in wanted])
    served = set(chosen)
    slots.tree.note_refused([key for key in wanted if key not in served] + beyond)
    # States of drafts evict nothing, because the drafts may be wrong.
    num_free = len(slots.free) - len(chosen)
    chosen += [key for key in guessed if key not in certain][:num_free]
    places = [certain.get(key) or guessed[key] for key in chosen]
    blocks = [steps[number].block_at(boundary.position) for number, boundary in places]
    destinations: dict[int, dict[int, int]] = {}
    for (number, boundary), slot in zip(places, slots.reserve(blocks, chosen), strict=True):
        destinations.setdefault(number, {})[boundary.position] = slot
    return [
        replace(step, destinations=destinations[number]) if number in destinations else step
        for number, step in enumerate(steps)
    ]


def _planned(step: PathStep, boundary: Boundary) -> PlannedState:
    depth = boundary.position // step.path.chain.block_size_tokens
    return step.path.chain.keys, depth, boundary.kind, step.path.request


def _is_inner(step: PathStep, boundary: Boundary) -> bool:
    """Whether a prefill passes the boundary, so that only kernels that store states inside one keep it."""
    return not step.decoding and boundary.position < step.stop
