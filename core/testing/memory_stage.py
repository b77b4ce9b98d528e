"""Scratch pools on which a model runs one step, so that every read and write of it can be judged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.state_pool import StatePool
from ..inference.contexts.step_inputs import StepInputs
from .step_memory import StepMemory

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Region(StrEnum):
    """Memory whose content before a step must not matter to it."""

    DESTINATIONS = "what the destinations held before the step"
    OTHER_SLOTS = "state slots that the step does not name"
    KV_WRITES = "what the KV positions of the new tokens held before the model wrote them"
    KV_TAILS = "KV positions at and beyond `kv_lengths` in the rows' last blocks"
    OTHER_KV = "KV blocks that no row holds, or block 0 through the padding of the block table"


FREE_MEMORY = frozenset(Region)


@dataclass(frozen=True)
class Fill:
    """What the memory around a step holds.

    Attributes:
        nan: the regions that hold NaN. All others hold random numbers.
        reseeded: the regions that hold other random numbers than usual.
        in_place: whether a source that is also a destination is one slot, as the engine has it. If not,
            the source is a copy elsewhere.
        zero_sources: whether rows without a source (-1) name a slot full of zeros instead; with `in_place`
            the one that is their destination.
        disturbed_kv: whether the KV of this step's tokens that is cached already is altered.
        disturbed: (index of the state tensor; layer; source slots): these states are altered there.
    """

    nan: frozenset[Region] = frozenset()
    reseeded: frozenset[Region] = frozenset()
    in_place: bool = False
    zero_sources: bool = False
    disturbed_kv: bool = False
    disturbed: tuple[int, int, Sequence[int]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What one call of the model did.

    Attributes:
        logits: what the model returned.
        states: the tensors of the states at the step's destinations, each [layers, writes, *shape].
        states_written: which numbers of `states` changed.
        kv: [layers, 2, KV writes, kv heads, head dim], the KV at the step's KV positions.
        kv_written: [layers, 2, KV writes], where any number changed.
        touched_sources, touched_guards, touched_slots: how many slots changed that are no destinations: those
            the step reads; the first and the last of the pool, which nobody names; any other.
        touched_guard_kv, touched_kv: how many KV positions changed that the step may not write: in the first
            and the last block, which nobody names; anywhere else.
        changed_inputs: the index tensors that the model changed.
    """

    logits: object
    states: tuple[Tensor, ...]
    states_written: tuple[Tensor, ...]
    kv: Tensor
    kv_written: Tensor
    touched_sources: int
    touched_guards: int
    touched_slots: int
    touched_guard_kv: int
    touched_kv: int
    changed_inputs: tuple[str, ...]


class MemoryStage:
    """Pools of one engine's sizes, and a few slots more, on which a model is run instead of the engine's own.

    The model reads what the step names, and finds decoys everywhere else:

        pool index   0     | 1 .......... N   | N+1 ...         |  N+R+1 | N+R+2
        holds        guard | the pool's slots | sources, copied |  zeros | guard

    The KV cache has one guard block before the engine's blocks and one behind them. An index of -1 that is
    used as an index therefore hits a guard, and so does one that is clamped to 0.
    """

    def __init__(self, inputs: StepInputs, seed: int) -> None:
        """`inputs`: any step of the engine; only the sizes of its pools are read."""
        pool, kv = inputs.state_pool, inputs.kv_cache
        self._slots = pool.num_slots
        self._copies = pool.num_live
        self._block_size = kv.shape[3]
        self.pool = StatePool(
            pool.states, 1 + pool.num_live, pool.num_durable + self._copies + 2, pool.memory.device
        )
        self.kv = kv.new_zeros(*kv.shape[:2], kv.shape[2] + 2, *kv.shape[3:])
        generator = torch.Generator().manual_seed(seed)
        self._decoys = [
            [
                torch.randn(memory.shape, generator=generator, device="cpu").to(memory.device, memory.dtype)
                for memory in (*self._states, self._flat_kv)
            ]
            for _ in range(2)
        ]

    @property
    def _states(self) -> tuple[Tensor, ...]:
        return self.pool.tensors

    @property
    def _flat_kv(self) -> Tensor:
        """[layers, 2, places, kv heads, head dim], a view."""
        return self.kv.flatten(2, 3)

    def run(
        self,
        model: Callable[[StepInputs], object],
        inputs: StepInputs,
        step: StepMemory,
        fill: Fill = Fill(),
    ) -> Outcome:
        """Call the model once; raises what the model raises.

        Args:
            inputs: of the engine, padded or not. Its pools are read, and not written.
            step: what `inputs` names.
        """
        places = self._load(inputs, step, fill)
        before = [memory.clone() for memory in (*self._states, self._flat_kv)]
        staged = self._staged(inputs, step, fill, places)
        tensors = _index_tensors(staged)
        originals = {name: tensor.clone() for name, tensor in tensors.items()}
        logits = model(staged)
        changed = [
            _changed(old, new) for old, new in zip(before, (*self._states, self._flat_kv), strict=True)
        ]
        slots = [1 + slot for slot in step.slots]
        kv_places = [self._block_size + write.place for write in step.kv_writes]
        *changed_states, changed_kv = changed
        touched = {slot for part in changed_states for slot in _touched(part, 1)} - set(slots)
        tails = _index(self._new_tails(step), self.kv)
        stray = changed_kv.index_copy(2, tails, changed_kv[:, :, tails] & (self._flat_kv[:, :, tails] != 0))
        stray_kv = _touched(stray, 2) - set(kv_places)
        guards, last = {0, len(self.pool.memory) - 1}, self._flat_kv.shape[2] - self._block_size
        sources = set(places.values())
        return Outcome(
            logits=logits,
            states=tuple(_at(states, 1, slots) for states in self._states),
            states_written=tuple(_at(part, 1, slots) for part in changed_states),
            kv=_at(self._flat_kv, 2, kv_places),
            kv_written=_at(changed_kv, 2, kv_places).flatten(3).any(3),
            touched_sources=len(touched & sources),
            touched_guards=len(touched & guards),
            touched_slots=len(touched - sources - guards),
            touched_guard_kv=sum(place < self._block_size or place >= last for place in stray_kv),
            touched_kv=sum(self._block_size <= place < last for place in stray_kv),
            changed_inputs=tuple(
                name for name, tensor in tensors.items() if not torch.equal(tensor, originals[name])
            ),
        )

    def _new_tails(self, step: StepMemory) -> list[int]:
        """The KV places, to which zeros may be written, behind a row's last token in a new block."""
        size = self._block_size
        written = {write.place for write in step.kv_writes}
        tails: list[int] = []
        for row in step.rows:
            first = row.blocks[-1] * size
            if row.stop % size and first in written:
                tails += range(size + first + row.stop % size, size + first + size)
        return tails

    def _load(self, inputs: StepInputs, step: StepMemory, fill: Fill) -> dict[int, int]:
        """Fill the scratch pools; returns the place of each source."""
        places = {
            source: 1 + source if fill.in_place and source in step.slots else 1 + self._slots + index
            for index, source in enumerate(step.sources)
        }
        taken = set(places.values())
        destinations = [1 + slot for slot in step.slots if 1 + slot not in taken]
        zeros = 1 + self._slots + self._copies
        others = set(range(len(self.pool.memory))) - taken - set(destinations) - {zeros}
        slots = {Region.DESTINATIONS: destinations, Region.OTHER_SLOTS: sorted(others)}
        for index, (states, own) in enumerate(zip(self._states, inputs.state_pool.tensors, strict=True)):
            self._fill(states, 1, self._decoys[0][index], self._decoys[1][index], slots, fill)
            states[:, zeros] = 0
            if fill.zero_sources and fill.in_place:
                fresh = [1 + write.slot for write in step.writes if step.rows[write.row].source < 0]
                states[:, _index(fresh, states)] = 0
            states[:, _index(places.values(), states)] = own[:, _index(places, states)]
        if fill.disturbed is not None:
            tensor, layer, disturbed = fill.disturbed
            states = self._states[tensor]
            at = _index([places[source] for source in disturbed], states)
            noise = self._decoys[1][tensor][layer, at]
            states[layer, at] += noise * (1 + states[layer, at].abs().mean().to(noise.dtype))

        size = self._block_size
        reads = [size + place for place in step.reads]
        writes = [size + write.place for write in step.kv_writes]
        held = {1 + block for row in step.rows for block in row.blocks}
        inside = {block * size + offset for block in held for offset in range(size)}
        outside = set(range(self._flat_kv.shape[2])) - inside
        kv = {
            Region.KV_WRITES: writes,
            Region.KV_TAILS: sorted(inside - set(reads) - set(writes)),
            Region.OTHER_KV: sorted(outside),
        }
        self._fill(self._flat_kv, 2, self._decoys[0][-1], self._decoys[1][-1], kv, fill)
        cached = inputs.kv_cache.flatten(2, 3).index_select(2, _index(step.reads, self.kv))
        self._flat_kv.index_copy_(2, _index(reads, self.kv), cached)
        if fill.disturbed_kv:
            at = _index([size + place for place in step.cached_kv], self.kv)
            self._flat_kv.index_copy_(2, at, self._decoys[1][-1].index_select(2, at))
        return places

    def _fill(
        self,
        memory: Tensor,
        axis: int,
        decoys: Tensor,
        others: Tensor,
        regions: dict[Region, list[int]],
        fill: Fill,
    ) -> None:
        memory.copy_(decoys)
        for region, places in regions.items():
            at = _index(places, memory)
            if region in fill.nan:
                memory.index_fill_(axis, at, float("nan"))
            elif region in fill.reseeded:
                memory.index_copy_(axis, at, others.index_select(axis, at))

    def _staged(self, inputs: StepInputs, step: StepMemory, fill: Fill, places: dict[int, int]) -> StepInputs:
        """The step with the indices of the scratch pools in place of the engine's; every tensor is a copy."""
        own = _copied(inputs)
        for source, place in places.items():
            own.state_sources[inputs.state_sources == source] = place
        if fill.zero_sources:
            zeros = torch.full_like(own.state_sources, 1 + self._slots + self._copies)
            if fill.in_place:
                zeros[inputs.num_decodes :] = 1 + inputs.prefill_destinations
            own.state_sources[inputs.state_sources < 0] = zeros[inputs.state_sources < 0]
        blocks = -(-inputs.kv_lengths // self._block_size)
        columns = torch.arange(inputs.block_table.shape[1], device=blocks.device)
        own.block_table.add_(columns < blocks[:, None])
        _shift(own.kv_write_positions, self._block_size)
        for destinations in (
            own.state_destinations,
            own.chunks.destinations,
            own.checkpoints.destinations,
        ):
            _shift(destinations, 1)
        return replace(own, kv_cache=self.kv, state_pool=self.pool)


def _index(places: Iterable[int], memory: Tensor) -> Tensor:
    return torch.tensor(list(places), dtype=torch.int64, device=memory.device)


def _at(memory: Tensor, axis: int, places: Sequence[int]) -> Tensor:
    """A copy of these entries along an axis."""
    return memory.index_select(axis, _index(places, memory))


def _touched(changed: Tensor, axis: int) -> set[int]:
    """The entries along an axis of which any number changed."""
    return set(changed.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist())


def _shift(indices: Tensor, by: int) -> None:
    """Add to all indices that are not -1."""
    indices.add_(by * (indices >= 0))


def _copied(inputs: StepInputs) -> StepInputs:
    """The step with copies of all its index tensors."""
    parts: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor) and field.name != "kv_cache":
            parts[field.name] = value.clone()
        elif is_dataclass(value) and not isinstance(value, type):
            clones = {name: tensor.clone() for name, tensor in _tensors_of(value)}
            parts[field.name] = replace(value, **clones)
    return replace(inputs, **parts)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Which numbers have other bits."""
    integer = _INTEGERS[before.dtype.itemsize]
    return before.view(integer) != after.view(integer)


def _index_tensors(inputs: StepInputs) -> dict[str, Tensor]:
    """The tensors of a step by name, the pools excepted."""
    found: dict[str, Tensor] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor) and field.name != "kv_cache":
            found[field.name] = value
        elif is_dataclass(value):
            found |= {f"{field.name}.{name}": tensor for name, tensor in _tensors_of(value)}
    return found


def _tensors_of(part: Any) -> list[tuple[str, Tensor]]:
    """The fields of a dataclass that are tensors."""
    named = ((field.name, getattr(part, field.name)) for field in fields(part))
    return [(name, value) for name, value in named if isinstance(value, Tensor)]
