"""Where the state of each running request is, where durable slots store states in fewer bytes."""

from collections.abc import Mapping, Sequence

from ...state_tensor import TensorEncoding
from ..kernels.state_codec import decode_states, encode_states
from ..kernels.state_tensors import CodedTensor
from .cache.left_entries import LeftEntries
from .cache.prefix_cache import PrefixCache
from .device_memory import DeviceMemory
from .holding import Holding
from .mamba_metadata import MambaMetadata
from .request_states import RequestStates
from .request_step import RequestStep


class EncodedStates(RequestStates):
    """A request's state is in a live slot; in a durable slot only until its first step reads it.

    Kernels read and write live states. Before a step `gather` decodes the durable slots that requests resume
    from, to their live slots. After a step `scatter` encodes the states of the step's boundaries. A state
    at the end of a step is in a live slot anyway, and the request continues from there: no request continues
    from the rounded copy of its own state. A state inside a prefill is written to a *staging* slot:

        pool index   0 ........ num_live-1         | num_live ........ num_live+NUM_STAGING_SLOTS-1
        holds        live states; those that no    | states inside a step's prefills
                     request needs stage states too |

    Staging slots belong to one step. A state inside a prefill for which no slot is left is not taken.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        cache: PrefixCache,
        live_slots: MambaMetadata,
        encodings: Sequence[TensorEncoding],
        separate: bool = True,
        scratch: LeftEntries | None = None,
    ) -> None:
        """
        Args:
            live_slots: who owns which live slot; only read.
            separate: as in `RequestStates`.
            scratch: notes the pool indices of staged states; None for nothing.
        """
        super().__init__(memory.state_pool, cache, separate)
        self._memory = memory
        self._live_slots = live_slots
        self._encodings = tuple(encodings)
        self._scratch = scratch or LeftEntries()
        self._staged: dict[tuple[int, int], int] = {}  # row and position -> pool index, in this step

    def start_from(self, holding: Holding, slot: int, num_tokens: int) -> None:
        self._cache.hold_state(holding.path, slot, resumes=True)
        holding.state_index = -1  # until `gather`
        holding.num_computed = num_tokens

    def max_inner_states(self, steps: Sequence[RequestStep]) -> int | None:
        return len(self._staging_slots(steps))

    def _staging_slots(self, steps: Sequence[RequestStep]) -> list[int]:
        """The slots that nobody needs in a step: those for staging, then idle live ones."""
        own = range(self._pool.num_live, self._pool.num_live + self._pool.num_durable)
        drafts = [slot for step in steps if not step.decoding for slot in step.holding.live_slots[1:]]
        return [*own, *drafts, *self._live_slots.idle_slots]

    def gather(self, steps: Sequence[RequestStep]) -> None:
        """Before a step: decode the states that its requests resume from, and place its staged states."""
        places = iter(self._staging_slots(steps))
        self._staged = {
            (step.holding.row, position): next(places)
            for step in steps
            for position in step.destinations
            if not self._is_last(step, position)
        }
        self._scratch.note(self._staged.values())
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
        """The pool index where the step leaves the state at a boundary."""
        if self._is_last(step, position):
            return self._live_slot(step, position)
        return self._staged[step.holding.row, position]

    def destinations(self, step: RequestStep) -> list[int]:
        if not step.drafts:
            return [self._live_slot(step, step.stop)]
        return [self._live_slot(step, position + 1) for position in range(step.start, step.stop)]

    def inner_destinations(self, step: RequestStep) -> list[tuple[int, int]]:
        return [
            (position, self._place(step, position)) for position in step.destinations if position != step.stop
        ]

    def advance(self, step: RequestStep, committed: Mapping[int, int]) -> None:
        step.holding.num_computed = step.stop
        step.holding.state_index = self._live_slot(step, step.stop)

    def move_to_live(self, holding: Holding) -> None:
        self._decode([holding])

    def _decode(self, holdings: Sequence[Holding]) -> None:
        """Decode the pinned durable states of these requests to their live slots, and unpin them.

        An unpinned slot is written by a later launch of the same stream only.
        """
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

    def check_integrity(self, holdings: Sequence[Holding], during_step: bool) -> None:
        """Raise AssertionError where a request's state is neither in its pinned slot nor in a live slot."""
        for holding in holdings:
            if holding.path.state_slot >= 0:
                assert holding.state_index == -1, "a pinned state is decoded"
            elif self._has_state(holding) and not during_step:
                assert holding.state_index in holding.live_slots, "a request's state is somewhere else"
