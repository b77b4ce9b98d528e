"""Where the state of each running request is, also with replay, and with encoded cached states."""

from collections.abc import Callable, Mapping, Sequence

from ...state_spec import TensorEncoding
from ..kernels.state_codec import decode_states, encode_states
from ..kernels.state_tensors import CodedTensor
from .cache.prefix_cache import PrefixCache
from .device_memory import DeviceMemory, StatePool
from .request import Holding, RequestStep


class RequestStates:
    """Where each request's state is: in its live slot, or in a durable slot, pinned until a step reads it.

    This class alone writes `Holding.state_index` and `Holding.num_computed`. For kernels that update states
    in place, `gather` copies states to live slots before a step, and `scatter` copies boundary states from
    there afterwards, in one launch each.

    Where decodes replay, a request's state is the state at its last grid point. Every decode reads it, so it
    is copied to the one live slot before the first decode: no decode keeps a durable slot pinned.
    """

    def __init__(
        self, pool: StatePool, cache: PrefixCache, separate: bool = True, replay_chunk: int | None = None
    ) -> None:
        """
        Args:
            separate: whether kernels read a state at one pool index and write new states at others.
            replay_chunk: grid points are its multiples; None where decodes do not replay.
        """
        self._pool = pool
        self._cache = cache
        self._separate = separate
        self._stores = separate  # whether kernels write boundary states to durable slots
        self._replays = replay_chunk is not None
        self._grid = replay_chunk or 1

    def start_from(self, holding: Holding, slot: int, num_tokens: int) -> None:
        """Continue from the state after `num_tokens` tokens in a durable slot, perhaps a live slot now."""
        if not (self._pool.is_shared and slot in holding.live_slots):
            self._cache.hold_state(holding.path, slot, resumes=True)
        holding.state_index = self._pinned_index(slot)
        holding.num_computed = num_tokens

    def _pinned_index(self, slot: int) -> int:
        """`Holding.state_index` while the request's state is in a pinned durable slot."""
        return self._pool.durable_index(slot)

    def _last_grid_point(self, position: int) -> int:
        return position // self._grid * self._grid

    def _reaches_grid_point(self, step: RequestStep) -> bool:
        return self._last_grid_point(step.stop) > step.start

    def max_inner_states(self, steps: Sequence[RequestStep]) -> int | None:
        """How many states inside their prefills the steps can store; None: any number."""
        return None

    def gather(self, steps: Sequence[RequestStep]) -> None:
        """Before a step: copy states to live slots, where kernels that update states in place need them."""
        if self._separate:
            return
        sources, places = [], []
        for step in steps:
            holding = step.holding
            live = holding.live_slots[0]
            if holding.num_computed and holding.state_index != live:
                sources.append(holding.state_index)
                places.append(live)
                holding.state_index = live
                self._cache.release_state(holding.path)
        self._copy(sources, places)

    def scatter(self, steps: Sequence[RequestStep], late: Sequence[RequestStep] = ()) -> None:
        """After a step: copy boundary states from live slots to the slots reserved for them.

        Those are all of kernels that update in place, else those of `late`, reserved after the step.
        """
        sources, places = [], []
        for step in late if self._separate else steps:
            for position, slot in step.destinations.items():
                if position >= step.stop - len(step.drafts):  # a prefill itself stores the states inside it
                    sources.append(self._live_slot(step, position))
                    places.append(self._pool.durable_index(slot))
        self._copy(sources, places)

    def inner_destinations(self, step: RequestStep) -> list[tuple[int, int]]:
        """Positions inside a prefill, and the pool indices where the prefill stores the states there."""
        inner = [
            (position, self._pool.durable_index(slot))
            for position, slot in step.destinations.items()
            if position != step.stop
        ]
        last = self._last_grid_point(step.stop)
        if step.start < last < step.stop and last not in step.destinations:
            inner.append((last, self._live_slot(step, last)))
        return inner

    def completed_destination(self, step: RequestStep) -> int:
        """The pool index for the state of a chunk that a decode by replay completes; -1: none."""
        if not step.decoding or step.stop % self._grid:
            return -1
        return self._destination(step, step.stop)

    def destinations(self, step: RequestStep) -> list[int]:
        """The pool index for the state after the step; with drafts, one index for each token's state."""
        if self._replays and (step.decoding or step.stop % self._grid):
            return [-1] * (step.length if step.decoding else 1)
        if not step.drafts:
            return [self._destination(step, step.stop)]
        return [self._destination(step, position + 1) for position in range(step.start, step.stop)]

    def _destination(self, step: RequestStep, position: int) -> int:
        """The slot reserved for the state at `position`, or a live slot."""
        slot = step.destinations.get(position, -1) if self._stores else -1
        return self._live_slot(step, position) if slot < 0 else self._pool.durable_index(slot)

    def _live_slot(self, step: RequestStep, position: int) -> int:
        """The live slot for the state at `position`: the step's end, or the end of any token of a decode."""
        return step.holding.live_slots[0 if self._replays else position - step.stop + len(step.drafts)]

    def release_source(self, step: RequestStep) -> None:
        """After a launched step: unpin the durable slot that the step read, unless a later step reads it."""
        if self._reaches_grid_point(step):
            self._cache.release_state(step.holding.path)

    def advance(self, step: RequestStep, committed: Mapping[int, int]) -> None:
        """Note where a launched step wrote its request's state; `committed`: boundary -> its slot, or -1."""
        step.holding.num_computed = step.stop
        if self._reaches_grid_point(step):
            self._move(step, self._last_grid_point(step.stop), committed)
        if self._replays and step.holding.decoding:
            self.move_to_live(step.holding)

    def _move(self, step: RequestStep, position: int, committed: Mapping[int, int]) -> None:
        """Continue from the state that the step wrote at `position`."""
        holding = step.holding
        slot = committed.get(position, -1) if self._stores else -1
        if slot >= 0:
            self._cache.hold_state(holding.path, slot, resumes=False)
            holding.state_index = self._pool.durable_index(slot)
            return
        written = self._destination(step, position)
        holding.state_index = self._live_slot(step, position)
        if written != holding.state_index:  # the slot was refused; no launched kernel overwrites it yet
            self._copy([written], [holding.state_index])

    def skip(self, holding: Holding, num_tokens: int) -> None:
        """Count tokens as computed whose decodes did not move the state."""
        holding.num_computed += num_tokens

    def move_to_live(self, holding: Holding) -> None:
        """Copy a state that is only in a durable slot to the request's live slot, and unpin the former."""
        if holding.path.state_slot >= 0:
            live = holding.live_slots[0]
            self._copy([holding.state_index], [live])
            holding.state_index = live
            self._cache.release_state(holding.path)

    def _copy(self, sources: list[int], destinations: list[int]) -> None:
        if sources:
            self._pool.copy(sources, destinations)

    def check_integrity(self, holdings: Sequence[Holding], during_step: bool) -> None:
        """Raise AssertionError where a request's state is neither in its pinned slot nor in a live slot."""
        for holding in holdings:
            if holding.path.state_slot >= 0:
                assert holding.state_index == self._pinned_index(holding.path.state_slot)
            elif holding.num_computed >= self._grid and not during_step:
                assert holding.state_index in holding.live_slots, "a request's state is somewhere else"


class EncodedStates(RequestStates):
    """A request's state is in a live slot; in a durable slot only until its first step reads it.

    Before a step `gather` decodes the durable slots that requests resume from. After a step `scatter` encodes
    its boundary states. A request continues from its live slot, never from the rounded copy of its own state.
    A state inside a prefill is written to a *staging* slot:

        pool index   0 ........ num_live-1         | num_live ........ num_live+NUM_STAGING_SLOTS-1
        holds        live states; those that no    | states inside a step's prefills
                     request needs stage states too |

    Staging slots belong to one step. A state inside a prefill without a staging slot is not stored.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        cache: PrefixCache,
        idle_slots: Callable[[], Sequence[int]],
        encodings: Sequence[TensorEncoding],
        separate: bool = True,
    ) -> None:
        """`idle_slots`: the live slots that no request owns now."""
        super().__init__(memory.state_pool, cache, separate)
        self._memory = memory
        self._idle_slots = idle_slots
        self._encodings = tuple(encodings)
        self._stores = False
        self._staged: dict[tuple[int, int], int] = {}  # row and position -> pool index, in this step

    def _pinned_index(self, slot: int) -> int:
        return -1  # until `gather`

    def max_inner_states(self, steps: Sequence[RequestStep]) -> int | None:
        return len(self._staging_slots(steps))

    def _staging_slots(self, steps: Sequence[RequestStep]) -> list[int]:
        """The slots that are free in a step: those for staging, then idle live ones."""
        own = range(self._pool.num_live, self._pool.num_live + self._pool.num_durable)
        drafts = [slot for step in steps if not step.decoding for slot in step.holding.live_slots[1:]]
        return [*own, *drafts, *self._idle_slots()]

    def gather(self, steps: Sequence[RequestStep]) -> None:
        """Before a step: decode the states that its requests resume from, and place its staged states."""
        places = iter(self._staging_slots(steps))
        self._staged = {
            (step.holding.row, position): next(places)
            for step in steps
            for position in step.destinations
            if not self._is_last(step, position)
        }
        self._memory.scrubber.scratch.note(self._staged.values())
        self._decode([step.holding for step in steps])
        super().gather(steps)  # live states to where kernels in place need them

    def scatter(self, steps: Sequence[RequestStep], late: Sequence[RequestStep] = ()) -> None:
        """After a step: encode the states of its boundaries."""
        pairs = [
            (self._place(step, position), slot)
            for step in steps
            for position, slot in step.destinations.items()
        ]
        if pairs:
            encode_states(self._tensors(), *zip(*pairs, strict=True))

    def _is_last(self, step: RequestStep, position: int) -> bool:
        """Whether the state at `position` is in a live slot after the step."""
        return position >= step.stop - len(step.drafts)

    def _place(self, step: RequestStep, position: int) -> int:
        """The pool index where the step writes the state at a boundary."""
        if self._is_last(step, position):
            return self._live_slot(step, position)
        return self._staged[step.holding.row, position]

    def inner_destinations(self, step: RequestStep) -> list[tuple[int, int]]:
        return [
            (position, self._place(step, position)) for position in step.destinations if position != step.stop
        ]

    def move_to_live(self, holding: Holding) -> None:
        self._decode([holding])

    def _decode(self, holdings: Sequence[Holding]) -> None:
        """Decode these requests' pinned durable states to their live slots, and unpin them."""
        waiting = [holding for holding in holdings if holding.path.state_slot >= 0]
        if not waiting:
            return
        sources = [holding.path.state_slot for holding in waiting]
        decode_states(self._tensors(), sources, [holding.live_slots[0] for holding in waiting])
        for holding in waiting:
            holding.state_index = holding.live_slots[0]
            self._cache.release_state(holding.path)

    def _tensors(self) -> list[CodedTensor]:
        """The tensors of both pools, where they are now."""
        live, durable = self._pool, self._memory.durable_pool
        return [
            CodedTensor(
                live[encoding.state.name],
                durable[encoding.numbers.name],
                None if encoding.scales is None else durable[encoding.scales.name],
                encoding.state.scale_axis if encoding.scales is not None else None,
            )
            for encoding in self._encodings
        ]
