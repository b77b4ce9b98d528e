"""The prefix cache of an engine as transfers see it: nothing else in this folder looks into an engine."""

from dataclasses import dataclass

from torch import Tensor

from ...inference.contexts.kv_block_allocator import KVBlockAllocator
from ...inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...state_spec import HybridStateSpec
from ...validation import instance
from ..all_ranks import AllRanks


@dataclass(frozen=True, eq=False)
class CacheAccess:
    """One rank's prefix cache, between two steps of its engine; valid until the engine is called again.

    Attributes:
        kv_blocks: who holds which KV block, and which prefix each block stores.
        slots: which durable slot holds which block's state.
        kv_cache: [attention layers, 2, blocks, block size, KV heads, head dim], on the device.
        conv_states: [Mamba layers, slots, channels, window], on the device.
        ssm_states: [Mamba layers, slots, heads, head dim, state dim], on the device.
        spec: the shapes of the part of the model that this rank holds.
        block_size_tokens: tokens of a block.
        eviction_policy: the engine's `prefix_caching_eviction_policy`.
        weights_version: what the engine's weights are called.
    """

    kv_blocks: KVBlockAllocator
    slots: MambaSlotAllocator
    kv_cache: Tensor
    conv_states: Tensor
    ssm_states: Tensor
    spec: HybridStateSpec
    block_size_tokens: int
    eviction_policy: str
    weights_version: object

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
        if context.suspended:
            raise RuntimeError(f"{call} is called on a suspended engine; resume it first")
        if context.step_chunks:
            raise RuntimeError(f"{call} is called during a step; end or abort it first")
        slots = context.mamba_slot_allocator
        if slots is None:
            raise ValueError("enable_prefix_caching is False; accepted: an engine that caches prefixes")
        return cls(
            kv_blocks=context.kv_block_allocator,
            slots=slots,
            kv_cache=context.kv_cache,
            conv_states=slots.conv_states,
            ssm_states=slots.ssm_states,
            spec=context.spec,
            block_size_tokens=context.block_size_tokens,
            eviction_policy=engine.config.prefix_caching_eviction_policy,
            weights_version=engine.weights_version,
        )

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
        blocks, findable = self.slots.slot_to_block.tolist(), set(self.slots.hash_to_block_id.values())
        return {blocks[slot]: slot for slot in reversed(self.slots.slots_by_use) if blocks[slot] in findable}
