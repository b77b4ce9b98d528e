"""The inputs of decodes by replay: their shapes, and the KV blocks that hold them."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from ...config import InferenceConfig
from ...state_spec import STATE_ALIGNMENT, HybridStateSpec
from ...validation import ceil_div
from .cache.kv_block_allocator import KVBlockAllocator
from .dynamic_request import Allocation, ScheduledRequest

InputShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

MAX_INPUT_BLOCKS = 64  # input blocks of a chunk at most; smaller ones would be allocated too often


class InputBlocks(NamedTuple):
    """How the inputs of a chunk are cut into blocks, which a request allocates as it comes to them.

    Without tokens there are no input blocks: each row has memory of its own for a whole chunk.
    """

    tokens: int = 0  # of an input block
    per_chunk: int = 0

    @classmethod
    def fitting(cls, config: InferenceConfig, spec: HybridStateSpec, sizes: Sequence[int | None]) -> Self:
        """The largest that fit into KV blocks of all ranks, evenly filled; `sizes`: tokens, of each rank."""
        tokens = min((size for size in sizes if size is not None), default=0)
        if not tokens:
            return cls()
        chunk = spec.chunk_tokens(config.block_size_tokens)
        per_chunk = ceil_div(chunk, tokens)
        return cls(ceil_div(chunk, per_chunk), per_chunk) if per_chunk <= MAX_INPUT_BLOCKS else cls()

    def num_for_tokens(self, num_tokens: int) -> int:
        """Input blocks of the first tokens of a chunk."""
        return ceil_div(num_tokens, self.tokens) if self.tokens else 0

    def num_for_requests(self, count: int) -> int:
        """Input blocks of so many requests: half of their chunks, and four standard deviations."""
        half = count * (self.per_chunk + 1) / 2 + 4 * math.sqrt(count / 12) * self.per_chunk
        return min(count * self.per_chunk, math.ceil(half))

    def num_added_blocks(self, config: InferenceConfig, num_blocks: int) -> int:
        """KV blocks to add to `num_blocks`, so that requests whose KV surely fits find input blocks, too.

        Example: 10 requests of at most 4 KV and 15 input blocks. Of 100, 60 may be evicted: 90 are added.
        """
        rows, longest = config.max_requests, ceil_div(config.max_sequence_length, config.block_size_tokens)
        spare, average = num_blocks - rows * longest, self.num_for_requests(rows)
        return average if spare < 0 else max(average, rows * self.per_chunk - spare)


class InputBlockTable:
    """Which input blocks running requests have: KV blocks of no path. Without such blocks, numbers of rows.

    Attributes:
        array: [rows, input blocks of a chunk] int32.
    """

    def __init__(
        self, sizes: InputBlocks, num_rows: int, chunk_size: int, kv_blocks: KVBlockAllocator
    ) -> None:
        self._sizes = sizes
        self._chunk_size = chunk_size
        self._kv_blocks = kv_blocks
        rows = np.arange(num_rows, dtype=np.int32)[:, None]
        self.array = np.zeros((num_rows, sizes.per_chunk), np.int32) if sizes.tokens else rows

    def num_input_blocks(self, num_tokens: int) -> int:
        """KV blocks for the inputs of a request with so many tokens: of those since the last grid point."""
        return self._sizes.num_for_tokens(num_tokens % self._chunk_size)

    def num_missing(self, allocation: Allocation, num_inputs: int) -> int:
        """Input blocks that the request lacks for the first `num_inputs` tokens of its chunk."""
        return max(0, self._sizes.num_for_tokens(num_inputs) - len(allocation.input_blocks))

    def grow(self, allocation: Allocation, num_inputs: int) -> None:
        """Allocate the missing input blocks."""
        if num_missing := self.num_missing(allocation, num_inputs):
            first = len(allocation.input_blocks)
            allocation.input_blocks += self._kv_blocks.allocate_memory_blocks(num_missing)
            self.array[allocation.row, first : len(allocation.input_blocks)] = allocation.input_blocks[first:]

    def grow_for_drafts(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> Sequence[int]:
        """Allocate input blocks for drafts, as far as blocks are free; returns the drafts with room."""
        if not self._sizes.tokens:
            return tokens
        num_blocks = len(scheduled.allocation.input_blocks) + self._kv_blocks.total_avail
        num_inputs = scheduled.start % self._chunk_size + scheduled.length
        tokens = tokens[: num_blocks * self._sizes.tokens - num_inputs]
        self.grow(scheduled.allocation, num_inputs + len(tokens))
        return tokens

    def release(self, allocation: Allocation) -> None:
        """Release the input blocks of a request; launched steps read them before others write."""
        blocks, allocation.input_blocks = allocation.input_blocks, []
        self._kv_blocks.release_memory_blocks(blocks)

    def check_integrity(self, allocation: Allocation) -> None:
        """Raise AssertionError where a request has other input blocks than its row, too many or too few."""
        blocks = allocation.input_blocks
        assert len(blocks) <= self._sizes.per_chunk, "a row has too many input blocks"
        assert self.array[allocation.row, : len(blocks)].tolist() == blocks, "the input table is off"
        if allocation.decoding:
            assert len(blocks) >= self.num_input_blocks(allocation.num_computed), "a row's inputs lie nowhere"


def tokens_of_input_block(config: InferenceConfig, spec: HybridStateSpec) -> int | None:
    """Tokens whose inputs fit into a KV block of this rank, a chunk's at most; None: any number."""
    if not (config.replays and spec.strided_blocks):
        return 0
    if not input_block_offsets(spec, 1)[1]:
        return None
    block = spec.kv_block_bytes(config.block_size_tokens)
    sizes = range(spec.chunk_tokens(config.block_size_tokens), 0, -1)
    return next((size for size in sizes if input_block_offsets(spec, size)[1] <= block), 0)


def input_block_offsets(spec: HybridStateSpec, num_tokens: int) -> tuple[dict[str, int], int]:
    """Where the inputs in a block of tokens begin, each with all its layers; and the block's bytes."""
    offsets, end = {}, 0
    for tensor in spec.states:
        for entry in tensor.inputs:
            if entry.layout == "block":
                offsets[entry.name] = end
                size = tensor.num_layers * num_tokens * math.prod(entry.shape) * entry.dtype.itemsize
                end += ceil_div(size, STATE_ALIGNMENT) * STATE_ALIGNMENT
    return offsets, end


def input_shapes(config: InferenceConfig, spec: HybridStateSpec, in_blocks: bool = False) -> InputShapes:
    """Name -> [layers, rows, *shape of one request] and dtype of the inputs, with padded drafts.

    `in_blocks`: without the inputs that can lie in input blocks.
    """
    if not config.replays:
        return {}
    chunk = spec.chunk_tokens(config.block_size_tokens)
    num_drafts = (1 << config.num_speculative_tokens.bit_length()) - 1
    return {
        entry.name: (
            (tensor.num_layers, config.max_requests, *entry.of_request(chunk, num_drafts)),
            entry.dtype,
        )
        for tensor in spec.states
        for entry in tensor.inputs
        if not (in_blocks and entry.layout == "block")
    }


def input_bytes(shapes: InputShapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
