"""A host of the slot allocator by the names of megatron-core's context, with nothing behind them.

`names` "0.19" is a host of megatron-core 0.19, "0.20" a later one. A state is made of numbers that
say whose it is and after how many tokens, so that a test can distinguish them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from mambaslots.mcore.slot_allocator import HostSlotAllocator, Settings
from torch import Tensor

CONV_SHAPE = (3, 4)
SSM_SHAPE = (2, 3, 2)


class FakeKV:
    """The KV side that the slot allocator reads."""

    def __init__(self, num_blocks: int, names: str) -> None:
        setattr(self, "total_count" if names == "0.19" else "pool_size", num_blocks)
        self.block_hashes = torch.full((num_blocks,), -1, dtype=torch.int64)
        self.block_ref_counts = torch.ones(num_blocks, dtype=torch.int32)
        self.block_timestamps = torch.zeros(num_blocks, dtype=torch.int64)

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        self.block_hashes[list(blocks)] = torch.tensor(hashes, dtype=torch.int64)

    def deregister(self, blocks: Sequence[int], callback: Callable[..., None], clear_first: bool) -> None:
        """Call back before the hashes are cleared, as 0.19 does, or after, as 0.20."""
        listed = list(blocks)
        hashes = {key for key in self.block_hashes[listed].tolist() if key > 0}
        if not clear_first:
            callback(listed, hashes)
        self.block_hashes[listed] = -1
        self.block_ref_counts[listed] = 0
        if clear_first:
            callback(listed, hashes)


@dataclass
class FakeRequest:
    """`number` distinguishes its states from those of others."""

    number: int
    prompt_tokens: Sequence[int]
    precomputed_block_hashes: Sequence[int] = (1,)
    finished_chunk_token_count: int = 0


@dataclass
class Chunk:
    request: FakeRequest
    row: int
    skip: int
    length: int

    @property
    def start(self) -> int:
        return self.request.finished_chunk_token_count + self.skip

    @property
    def stop(self) -> int:
        return self.request.finished_chunk_token_count + self.length


@dataclass
class FakeHost:
    num_blocks: int = 16
    max_requests: int = 4
    block_size_tokens: int = 4
    chunk: int = 2
    layers: int = 2
    names: str = "0.19"
    policy: Any = "lru"
    dtype: torch.dtype = torch.float32
    optional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv_block_allocator = FakeKV(self.num_blocks, self.names)
        self.prefix_caching_eviction_policy = self.policy
        self.mamba_chunk_size = self.chunk
        if self.names == "0.20":
            self.ssm_chunk_alignment = self.chunk
        self.max_mamba_intermediate_states_per_step = 3 * self.max_requests
        self.batch_dimensions = SimpleNamespace(prefill_req_count=0, decode_req_count=0)
        self.paused_request_count = 0
        self.request_to_kv_block_ids = torch.full((self.max_requests, self.num_blocks), -1, dtype=torch.int32)
        live_slots = torch.arange(self.max_requests - 1, -1, -1, dtype=torch.int32)
        self.mamba_metadata = SimpleNamespace(
            request_to_mamba_state_idx=live_slots, intermediate_count=0, per_request_intermediate_counts=[]
        )
        shape = (self.layers, self.max_requests)
        self.mamba_conv_states = torch.zeros(*shape, *CONV_SHAPE, dtype=self.dtype)
        self.mamba_ssm_states = torch.zeros(*shape, *SSM_SHAPE, dtype=self.dtype)
        for name, value in self.optional.items():
            setattr(self, name, value)

    def allocator(self, max_slots: int, cls: Callable[..., Any]) -> Any:
        """A slot allocator, constructed as hosts do."""
        return cls(
            context=self,
            max_slots=max_slots,
            num_mamba_layers=self.layers,
            conv_states_shape=CONV_SHAPE,
            ssm_states_shape=SSM_SHAPE,
            conv_states_dtype=self.dtype,
            ssm_states_dtype=self.dtype,
        )

    def mcore_allocator(self, max_slots: int) -> Any:
        """The one that `mambaslots.mcore` installs, with the plan in `optional`; it caches no answers."""
        plan = self.optional.get("checkpoint_plan", CheckpointPlan())

        class Allocator(HostSlotAllocator):
            settings = Settings(plan, cache_answers=False)

        return self.allocator(max_slots, Allocator)

    def using_cuda_graph_this_step(self) -> bool:
        return False

    # ---- a prefill step

    def plan(
        self, slots: Any, chunk: Chunk, blocks: Sequence[int], matched: int = 0, required: int | None = None
    ) -> None:
        """`add_request`: the row's block table, then the allocator's plan of this chunk."""
        self.request_to_kv_block_ids[chunk.row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        before = -(-chunk.request.finished_chunk_token_count // self.block_size_tokens)
        slots.compute_and_store_offsets(
            chunk.request,
            chunk.row,
            chunk.skip,
            chunk.length,
            matched,
            list(blocks[before : before + matched]),
            -(-chunk.stop // self.block_size_tokens) if required is None else required,
        )

    def forward(self, slots: Any, chunks: Sequence[Chunk]) -> None:
        """Fill scratch and live states as megatron-core's mixers do; rows of `chunks` follow one another."""
        first = min(chunk.row for chunk in chunks)
        self.batch_dimensions.prefill_req_count = len(chunks)
        self.batch_dimensions.decode_req_count = first - self.paused_request_count
        offsets, counts = slots.get_intermediate_cpu_data()
        wanted = [[] for _ in chunks] if counts is None else _ragged(offsets, counts)
        self.mamba_metadata.per_request_intermediate_counts = [len(row) for row in wanted]
        self.mamba_metadata.intermediate_count = sum(len(row) for row in wanted)
        scratch = 0
        for chunk, row in zip(sorted(chunks, key=lambda c: c.row), wanted, strict=True):
            for offset in row:
                state = self.state_after(chunk.request, chunk.start + offset)
                slots.intermediate_conv_out[:, scratch], slots.intermediate_ssm_out[:, scratch] = state
                scratch += 1
            self.set_live(chunk.row, self.state_after(chunk.request, chunk.stop))

    def state_after(self, request: FakeRequest, tokens: int) -> tuple[Tensor, Tensor]:
        """(conv, ssm) of all layers after `tokens` tokens of `request`."""
        layers = torch.arange(self.layers)
        values = (100 * request.number + tokens + 1000 * layers).to(self.dtype)
        conv = values.reshape(-1, 1, 1) + torch.arange(4) / 8
        ssm = -values.reshape(-1, 1, 1, 1) - torch.arange(2) / 8
        return conv.expand(-1, *CONV_SHAPE), ssm.expand(-1, *SSM_SHAPE)

    def set_live(self, row: int, state: tuple[Tensor, Tensor]) -> None:
        index = int(self.mamba_metadata.request_to_mamba_state_idx[row])
        self.mamba_conv_states[:, index], self.mamba_ssm_states[:, index] = state

    def live(self, row: int) -> tuple[Tensor, Tensor]:
        index = int(self.mamba_metadata.request_to_mamba_state_idx[row])
        return self.mamba_conv_states[:, index], self.mamba_ssm_states[:, index]


def durable(slots: Any, slot: int) -> tuple[Tensor, Tensor]:
    return slots.conv_states[:, slot], slots.ssm_states[:, slot]


def same_bytes(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    """Equal to the bit, NaN payloads included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def _ragged(offsets: Tensor, counts: Tensor) -> list[list[int]]:
    return [row[:count] for row, count in zip(offsets.tolist(), counts.tolist(), strict=True)]
