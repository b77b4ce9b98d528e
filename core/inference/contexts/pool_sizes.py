"""How many KV blocks and durable slots a configuration buys, on one rank and on all of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ...config import InferenceConfig
from ...devices import GIGABYTE, available_gb
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX, ceil_div
from .cache.memory import MemoryDivision, RankBudget, UnitSizes
from .input_blocks import InputBlocks, input_bytes, input_shapes, tokens_of_input_block

_UNLIMITED = INT32_MAX + 2  # what a rank affords where a unit has no bytes. The minimum over the ranks counts

NUM_STAGING_SLOTS = 2
"""Slots for states inside prefills until they are encoded: the default plan's tail and branch point."""
MAX_NAMES = 1 << 20  # KV blocks without bytes that a context makes for cached prefixes, at most


@dataclass(frozen=True)
class PoolSizes:
    """KV blocks and slots, equal on all ranks; with a `division` they share one memory.

    Example: 10 units that each hold 1 state or 5 blocks count as 10 slots and 50 blocks. While 4 of them hold
    states, there is memory for 30 blocks.
    """

    num_kv_blocks: int  # with those of input blocks
    num_mamba_slots: int
    division: MemoryDivision | None = None
    input_blocks: InputBlocks = field(default=InputBlocks())

    @classmethod
    def of(cls, config: InferenceConfig, spec: HybridStateSpec) -> "PoolSizes":
        """The largest pools that every rank can afford. A collective; all ranks raise the same ValueError."""
        in_blocks, in_rows = (RankMemory.of(config, spec, each) for each in (True, False))
        own = tokens_of_input_block(config, spec), in_blocks, in_rows
        gathered: list[tuple[int | None, RankMemory, RankMemory]] = spec.groups.gather(own, spec.device)
        input_blocks = InputBlocks.fitting(config, spec, [num_tokens for num_tokens, _, _ in gathered])
        ranks = [in_blocks if input_blocks.tokens else in_rows for _, in_blocks, in_rows in gathered]
        shared = [rank for rank, memory in enumerate(ranks) if memory.total_gb is not None]
        if 0 < len(shared) < len(ranks):
            raise ValueError(
                f"total_gb is set on the ranks {shared} of {len(ranks)}; accepted: on all or on none"
            )
        caching = [rank.caches for rank in ranks]
        if len(set(caching)) > 1:
            raise ValueError(
                f"enable_prefix_caching is {caching} on the ranks of the model; accepted: the same on all"
            )
        if shared:
            return replace(_of_total(config, ranks, input_blocks.per_chunk), input_blocks=input_blocks)
        num_slots = min(rank.num_slots for rank in ranks) if config.enable_prefix_caching else 0
        num_blocks = min(rank.num_blocks for rank in ranks)
        num_blocks += input_blocks.num_added_blocks(config, num_blocks)
        return cls(num_blocks, num_slots, input_blocks=input_blocks)


class RankMemory(NamedTuple):
    """What one rank has for both pools: numbers of blocks and slots, or the budget that `gb` leaves."""

    num_blocks: int
    num_slots: int
    total_gb: float | None
    budget: RankBudget  # bytes of states and KV, live states included, and what they are spent on
    undivided_bytes: int  # of running requests' inputs, and of live states where cached ones are encoded
    caches: bool
    can_divide: bool  # whether states and KV can share one memory

    @classmethod
    def of(cls, config: InferenceConfig, spec: HybridStateSpec, in_blocks: bool) -> "RankMemory":
        """`in_blocks`: whether inputs of decodes by replay lie in KV blocks, as far as they can."""
        caching, num_live = config.enable_prefix_caching, num_live_slots(config)
        encoded = caching and config.durable_state_dtype is not None
        undivided = input_bytes(input_shapes(config, spec, in_blocks))
        slot = spec.slot_bytes
        if encoded:  # live states are no part of what is divided
            undivided += (num_live + NUM_STAGING_SLOTS) * slot
            num_live, slot = 0, spec.durable_slot_bytes(config.durable_state_dtype)
        sizes = UnitSizes(slot, spec.kv_block_bytes(config.block_size_tokens))
        budget = RankBudget(sizes, int((config.total_gb or 0.0) * GIGABYTE) - undivided, num_live)
        can_divide = caching and not encoded and spec.strided_blocks
        num_blocks, num_slots = config.num_kv_blocks or 0, config.num_mamba_slots or 0
        return cls(num_blocks, num_slots, config.total_gb, budget, undivided, caching, can_divide)

    @property
    def _left(self) -> int:
        """Bytes without live states."""
        return self.budget.memory - self.budget.num_live * self.budget.sizes.slot

    def slots_with(self, num_blocks: int, has_kv: bool) -> int:
        """Cached states for the rest, or for half of it: one or more, with so many KV blocks."""
        slot, block = self.budget.sizes
        share = self._left // 2 if has_kv else self._left
        return min(max(share, slot), self._left - num_blocks * block) // slot if slot else _UNLIMITED

    def blocks_with(self, num_slots: int) -> int:
        """KV blocks for the rest after so many cached states."""
        slot, block = self.budget.sizes
        return (self._left - num_slots * slot) // block if block else _UNLIMITED

    def least_bytes(self, num_blocks: int) -> int:
        """Bytes of live states, of a cached one and of `num_blocks` KV blocks."""
        slot, block = self.budget.sizes
        return (self.budget.num_live + self.caches) * slot + num_blocks * block


def _of_total(config: InferenceConfig, ranks: Sequence[RankMemory], num_input_blocks: int) -> PoolSizes:
    """The pools that `total_gb` buys: live states and inputs first, then cached states and KV in one memory.

    Without states, KV or caching, all goes to the other kind. Encoded states and KV get a half each.
    `num_input_blocks`: KV blocks of one request's inputs.
    """
    longest = ceil_div(config.max_sequence_length, config.block_size_tokens) + num_input_blocks
    has_states = any(rank.budget.sizes.slot for rank in ranks)
    has_kv = any(rank.budget.sizes.block for rank in ranks)
    caches_states = config.enable_prefix_caching and has_states
    if caches_states and has_kv and all(rank.can_divide for rank in ranks):
        division = MemoryDivision.of([rank.budget for rank in ranks], longest)
        if division.num_units < division.num_kv_units:
            raise _too_small(config, ranks, [division.least_bytes(rank.budget.sizes) for rank in ranks])
        division = replace(division, slots_per_request=division.num_live // config.max_requests)
        return PoolSizes(division.num_kv_blocks, division.num_durable_slots, division)
    slots = min(rank.slots_with(longest, has_kv) for rank in ranks) if caches_states else 0
    blocks = min(rank.blocks_with(slots) for rank in ranks)
    if blocks < longest or (caches_states and slots < 1):
        raise _too_small(config, ranks, [rank.least_bytes(longest) for rank in ranks])
    if not has_kv:
        # Blocks name prefixes only: those of running requests, and four times those of all slots' longest
        # prefixes, but at most `MAX_NAMES`, because the bookkeeping of a block costs some hundred bytes.
        slots = min(slots, MAX_NAMES)
        names = config.max_requests * longest + min(4 * slots * longest, MAX_NAMES)
        return PoolSizes(min(names, INT32_MAX), slots)
    blocks = min(blocks, INT32_MAX)
    if config.enable_prefix_caching and not has_states:
        slots = min(blocks, MAX_NAMES)
    return PoolSizes(blocks, slots)


def _too_small(config: InferenceConfig, ranks: Sequence[RankMemory], least: Sequence[int]) -> ValueError:
    """The error of the rank that lacks most; `least`: bytes for states and KV that each rank needs."""
    needed = [(size + rank.undivided_bytes) / GIGABYTE for size, rank in zip(least, ranks, strict=True)]
    given = [rank.total_gb or 0.0 for rank in ranks]
    rank = max(range(len(ranks)), key=lambda i: needed[i] - given[i])
    state = "one cached state, " if config.enable_prefix_caching else ""
    where = f" on rank {rank}" if len(ranks) > 1 else ""
    return ValueError(
        f"total_gb is {given[rank]:.3g}{where}; accepted: at least {needed[rank]:.3g} "
        f"({needed[rank] - given[rank]:.3g} more) for {config.max_requests} running requests (max_requests), "
        f"{state}and the KV of one sequence of {config.max_sequence_length} tokens (max_sequence_length)"
    )


def num_live_slots(config: InferenceConfig) -> int:
    """Live slots of all running requests: one each, and one for each draft unless decodes replay."""
    return config.max_requests * (1 if config.replays else 1 + config.num_speculative_tokens)


# ---- where no size is given


def with_total_gb(config: InferenceConfig, device: torch.device) -> InferenceConfig:
    """`config`, with `total_gb` where no pool has a size."""
    if config.total_gb is None and config.num_kv_blocks is None:
        return replace(config, total_gb=available_gb(device))
    return config
