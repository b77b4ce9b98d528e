"""How many KV blocks and durable slots a configuration buys, on one rank and on all ranks of a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...config import InferenceConfig
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX
from .cache.memory import MemoryDivision, RankBudget, UnitSizes

GIGABYTE = 1 << 30
_UNLIMITED = INT32_MAX + 2
"""What a rank affords where a unit has no bytes. The minimum over the ranks counts."""

NUM_STAGING_SLOTS = 2
"""Slots for states inside prefills until they are encoded: the default plan's tail and branch point."""
_MOST_NAMES = 1 << 20
"""KV blocks without bytes that a context makes for cached prefixes, at most."""


@dataclass(frozen=True)
class PoolSizes:
    """Units of the two pools, equal on all ranks of a model.

    `division`: of one memory that states and KV share; the numbers of both then name more than there is.
    """

    num_kv_blocks: int
    num_mamba_slots: int
    division: MemoryDivision | None = None

    @classmethod
    def of(cls, config: InferenceConfig, spec: HybridStateSpec) -> "PoolSizes":
        """The largest pools that every rank of the model can afford.

        A collective: all ranks of `spec.groups` make this call. Synchronises the ranks.

        Raises:
            ValueError: a budget buys no unit on some rank, or the ranks differ in `enable_prefix_caching`, or
                in whether `total_gb` is set. All ranks raise the same error.
        """
        totals = spec.groups.gather(config.total_gb is not None, spec.device)
        if len(set(totals)) > 1:
            raise ValueError(
                f"total_gb is set on the ranks {[i for i, t in enumerate(totals) if t]} of "
                f"{len(totals)}; accepted: on all or on none"
            )
        if config.total_gb is not None:
            return _shared(config, spec)
        mine = config.num_kv_blocks or 0, config.num_mamba_slots or 0, config.enable_prefix_caching
        ranks = spec.groups.gather(mine, spec.device)
        _check_equal_caching([caching for *_, caching in ranks])
        num_slots = min(slots for _, slots, _ in ranks) if config.enable_prefix_caching else 0
        return cls(min(blocks for blocks, _, _ in ranks), num_slots)


class _Shares(NamedTuple):
    """What one rank could buy for its `total_gb`."""

    budget: RankBudget  # bytes of states and KV, live states included, and what they are spent on
    caching: bool
    strided: bool  # whether the model accepts KV blocks with gaps between them
    gb: float
    inputs: int  # bytes of running requests' inputs, and of live states where cached ones are encoded

    @property
    def _left(self) -> int:
        """Bytes without live states and inputs."""
        return self.budget.memory - self.budget.num_live * self.budget.sizes.slot

    @property
    def slots(self) -> int:
        slot = self.budget.sizes.slot
        return self._left // slot if slot else _UNLIMITED

    def slots_with(self, num_blocks: int) -> int:
        """Cached states for half of the rest: one or more, with so many KV blocks."""
        slot, block = self.budget.sizes
        if not slot:
            return _UNLIMITED
        return min(max(self._left // 2, slot), self._left - num_blocks * block) // slot

    def blocks_with(self, num_slots: int) -> int:
        """KV blocks for the rest after so many cached states."""
        slot, block = self.budget.sizes
        return (self._left - num_slots * slot) // block if block else _UNLIMITED

    def least_bytes(self, num_blocks: int) -> int:
        """Bytes of live states, of a cached one and of `num_blocks` KV blocks."""
        slot, block = self.budget.sizes
        return (self.budget.num_live + self.caching) * slot + num_blocks * block


def _shared(config: InferenceConfig, spec: HybridStateSpec) -> PoolSizes:
    """The pools that `total_gb` buys: live states and inputs first, then cached states and KV in one memory.

    A model without states or KV, or without caching, spends all on the other kind. Encoded states and KV get
    a half each.
    """
    caching, block = config.enable_prefix_caching, config.block_size_tokens
    longest = -(-config.max_sequence_length // block)
    inputs = config.max_requests * input_bytes(config, spec)
    num_live = num_live_slots(config)
    sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(block))
    memory = int((config.total_gb or 0.0) * GIGABYTE) - inputs
    encoded = caching and config.durable_state_dtype is not None
    if encoded:  # live states are no part of what is divided
        apart = (num_live + NUM_STAGING_SLOTS) * spec.slot_bytes
        inputs, memory, num_live = inputs + apart, memory - apart, 0
        sizes = UnitSizes(spec.durable_slot_bytes(config.durable_state_dtype), sizes.block)
    mine = _Shares(
        RankBudget(sizes, memory, num_live), caching, spec.strided_blocks, config.total_gb or 0.0, inputs
    )
    ranks: list[_Shares] = spec.groups.gather(mine, spec.device)
    _check_equal_caching([rank.caching for rank in ranks])
    has_states = any(rank.budget.sizes.slot for rank in ranks)
    has_kv = any(rank.budget.sizes.block for rank in ranks)
    if caching and has_states and has_kv and not encoded and all(rank.strided for rank in ranks):
        division = MemoryDivision.of([rank.budget for rank in ranks], longest)
        if division.num_units < division.num_kv_units:
            raise _too_small(config, ranks, [division.least_bytes(rank.budget.sizes) for rank in ranks])
        division = replace(division, slots_per_request=num_live // config.max_requests)
        return PoolSizes(division.num_kv_blocks, division.num_durable_slots, division)
    slots = 0
    if caching and has_states:
        slots = min(rank.slots_with(longest) if has_kv else rank.slots for rank in ranks)
    blocks = min(rank.blocks_with(slots) for rank in ranks)
    if blocks < longest or (caching and has_states and slots < 1):
        raise _too_small(config, ranks, [rank.least_bytes(longest) for rank in ranks])
    if not has_kv:
        slots = min(slots, _MOST_NAMES)
        return PoolSizes(_blocks_without_bytes(config, slots), slots)
    blocks = min(blocks, INT32_MAX)
    return PoolSizes(blocks, min(blocks, _MOST_NAMES) if caching and not has_states else slots)


def _check_equal_caching(switches: Sequence[bool]) -> None:
    if len(set(switches)) > 1:
        raise ValueError(
            f"enable_prefix_caching is {switches} on the ranks of the model; accepted: the same on all"
        )


def _too_small(config: InferenceConfig, ranks: Sequence[_Shares], least: Sequence[int]) -> ValueError:
    """The error of the rank that lacks most; `least`: bytes for states and KV that each rank needs."""
    needed = [size + rank.inputs for size, rank in zip(least, ranks, strict=True)]
    rank = max(range(len(ranks)), key=lambda i: needed[i] - ranks[i].gb * GIGABYTE)
    least_gb = needed[rank] / GIGABYTE
    states = "one cached state, " if config.enable_prefix_caching else ""
    where = f" on rank {rank}" if len(ranks) > 1 else ""
    return ValueError(
        f"total_gb is {ranks[rank].gb:.3g}{where}; accepted: at least {least_gb:.3g} "
        f"({least_gb - ranks[rank].gb:.3g} more) for {config.max_requests} running requests (max_requests), "
        f"{states}and the KV of one sequence of {config.max_sequence_length} tokens (max_sequence_length)"
    )


def num_live_slots(config: InferenceConfig) -> int:
    """Live slots of all running requests: one each, and one for each draft unless decodes replay."""
    return config.max_requests * (1 if config.replays else 1 + config.num_speculative_tokens)


def num_padded_drafts(config: InferenceConfig) -> int:
    """Drafts of a step at most, those included that rows of decodes are padded with."""
    return (1 << config.num_speculative_tokens.bit_length()) - 1


def input_bytes(config: InferenceConfig, spec: HybridStateSpec) -> int:
    """Bytes of the inputs that one running request keeps where decodes replay; 0 elsewhere."""
    if not config.replays:
        return 0
    chunk, drafts = spec.chunk_tokens(config.block_size_tokens), num_padded_drafts(config)
    return sum(
        tensor.num_layers * math.prod(entry.of_request(chunk, drafts)) * entry.dtype.itemsize
        for tensor in spec.states
        for entry in tensor.inputs
    )


def _blocks_without_bytes(config: InferenceConfig, num_slots: int) -> int:
    """KV blocks of a model without attention with `total_gb`: names of prefixes only.

    Those of running requests, and four times those of the longest prefixes of all slots, but at most
    `_MOST_NAMES`, because the bookkeeping of a block costs some hundred bytes.
    """
    blocks_per_sequence = -(-config.max_sequence_length // config.block_size_tokens)
    names = min(4 * num_slots * blocks_per_sequence, _MOST_NAMES)
    return min(config.max_requests * blocks_per_sequence + names, INT32_MAX)
