"""The prefix cache of an engine as transfers see it: nothing else in this folder looks into an engine."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...inference.contexts.cache.hashing import SaltKey
from ...inference.contexts.cache.kv_block_allocator import KVBlockAllocator
from ...inference.contexts.cache.prefix_cache import PrefixCache
from ...inference.contexts.cache.state_slots import StateSlots
from ...inference.contexts.device_memory import StatePool
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...state_spec import HybridStateSpec
from ...validation import instance
from ..all_ranks import AllRanks
from .parts import KV, segments_of


@dataclass(frozen=True, eq=False)
class CacheAccess:
    """One rank's prefix cache, between two steps of its engine; valid until the engine is called again.

    Attributes:
        cache: KV blocks, durable slots, and the index over both.
        pools: the tensors of an export by their names, as views of the pools on the device. "kv" is
            [attention layers, blocks, KV heads, 2, block size, head dim]; a segment of a state tensor is
            [layers, slots, units, width, ...].
        spec: the shapes of the part of the model that this rank holds; its states are the tensors of a
            durable slot, which may be encoded.
        block_size_tokens: tokens of a block.
        weights_version: what the engine's weights are called.
        changing: makes a context manager in which prefixes enter the cache; takes the errors that leave
            the books in order.
        salt_key: hashes the salts of prefixes.
        scrubs: whether memory that prefixes pass through is zeroed behind them.
    """

    cache: PrefixCache
    pools: Mapping[str, Tensor]
    spec: HybridStateSpec
    block_size_tokens: int
    weights_version: object
    changing: Callable[..., AbstractContextManager[None]]
    salt_key: SaltKey
    scrubs: bool

    @classmethod
    def of(cls, engine: DynamicInferenceEngine, call: str) -> "CacheAccess":
        """The cache of an engine that can be read and written now.

        Args:
            engine: of this rank.
            call: the name of the public function, for errors.

        Raises:
            ValueError: `engine` is no engine, or caches no prefixes.
            RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
        """
        instance("engine", engine, DynamicInferenceEngine)
        engine.check_usable(call)
        context = engine.context
        if not context.memory.allocated:
            raise RuntimeError(f"{call} is called on a suspended engine; resume it first")
        if context.steps:
            raise RuntimeError(f"{call} is called during a step; end or abort it first")
        if not engine.config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False; accepted: an engine that caches prefixes")
        return cls(
            cache=context.prefix_cache,
            pools=_pools(context.memory.kv_cache, context.memory.durable_pool),
            spec=replace(context.spec, states=context.memory.durable_pool.states),
            block_size_tokens=engine.config.block_size_tokens,
            weights_version=engine.weights_version,
            changing=engine.changing_cache,
            salt_key=engine.salt_key,
            scrubs=engine.config.free_memory == "zero",
        )

    @property
    def kv_blocks(self) -> KVBlockAllocator:
        """Who holds which KV block, and which prefix each block stores."""
        return self.cache.kv_blocks

    @property
    def slots(self) -> StateSlots:
        """Which durable slot holds which block's state."""
        return self.cache.slots

    @property
    def parallel(self) -> ParallelGroups:
        """The process groups of this replica."""
        return self.spec.groups

    @property
    def ranks(self) -> AllRanks:
        """The ranks of this replica."""
        return AllRanks(self.parallel, self.spec.device)

    def state_slots(self) -> dict[int, int]:
        """Block -> slot of each state that a prompt can find, the most recently used state first.

        A slot that a host has allocated but not registered is left out: its bytes are those of an earlier
        state until the host has written it.
        """
        states = self.slots.tree
        findable = set(states.hash_to_block_id.values())
        by_recency = [(states.block_of(slot), slot) for slot in reversed(states.states_by_recency())]
        return {block: slot for block, slot in by_recency if block in findable}


def _pools(kv_cache: Tensor, state_pool: StatePool) -> dict[str, Tensor]:
    pools = {KV: kv_cache.permute(0, 2, 4, 1, 3, 5)}
    for tensor in state_pool.states:
        segments, durable = segments_of(tensor), state_pool.durable(tensor.name)
        entries = durable if tensor.shape else durable[..., None]
        parts = torch.split(entries, [segment.size for segment in segments.values()], dim=2)
        for (name, segment), part in zip(segments.items(), parts, strict=True):
            pools[name] = torch.unflatten(part, 2, (segment.part.count, segment.width))
    return pools
