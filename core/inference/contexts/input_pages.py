"""The inputs of decodes by replay: their shapes, and the pages of them that lie in KV blocks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...config import InferenceConfig
from ...state_spec import STATE_ALIGNMENT, HybridStateSpec
from ...validation import ceil_div
from .cache.kv_block_allocator import KVBlockAllocator
from .dynamic_request import Allocation, ScheduledRequest

InputShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

MAX_PAGES = 64
"""Pages of a chunk at most; a smaller page would be allocated too often."""


class InputPages(NamedTuple):
    """Pages of such inputs, each in the memory of a KV block: taken as a request comes to them.

    Without tokens there are no pages: each row has memory of its own for a whole chunk.
    """

    tokens: int = 0  # of a page
    per_chunk: int = 0

    @classmethod
    def fitting(
        cls, config: InferenceConfig, spec: HybridStateSpec, page_tokens: Sequence[int | None]
    ) -> "InputPages":
        """The pages that fit into the blocks of all ranks, by `tokens_of_page` of each; evenly filled."""
        tokens = min((size for size in page_tokens if size is not None), default=0)
        if not tokens:
            return cls()
        chunk = spec.chunk_tokens(config.block_size_tokens)
        per_chunk = ceil_div(chunk, tokens)
        return cls(ceil_div(chunk, per_chunk), per_chunk) if per_chunk <= MAX_PAGES else cls()

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages of the first tokens of a chunk."""
        return ceil_div(num_tokens, self.tokens) if self.tokens else 0

    def num_pages_of(self, count: int) -> int:
        """Pages of so many requests: half of their chunks, and four standard deviations."""
        half = count * (self.per_chunk + 1) / 2 + 4 * math.sqrt(count / 12) * self.per_chunk
        return min(count * self.per_chunk, math.ceil(half))

    def num_added_blocks(self, config: InferenceConfig, num_blocks: int) -> int:
        """Blocks for pages, beside `num_blocks`: requests whose KV surely fits find pages, too.

        Example: 10 requests of at most 4 blocks and 15 pages. With 100 blocks, 60 may be evicted: 90 are
        added.
        """
        rows, longest = config.max_requests, ceil_div(config.max_sequence_length, config.block_size_tokens)
        spare, average = num_blocks - rows * longest, self.num_pages_of(rows)
        return average if spare < 0 else max(average, rows * self.per_chunk - spare)


NO_PAGES = InputPages()


class PageTable:
    """Which pages running requests have: KV blocks that belong to no path; without pages, the rows' numbers.

    Attributes:
        array: [rows, pages of a chunk] int32.
    """

    def __init__(
        self, pages: InputPages, num_rows: int, chunk_size: int, kv_blocks: KVBlockAllocator
    ) -> None:
        self._pages = pages
        self._chunk_size = chunk_size
        self._kv_blocks = kv_blocks
        rows = np.arange(num_rows, dtype=np.int32)[:, None]
        self.array = np.zeros((num_rows, pages.per_chunk), np.int32) if pages.tokens else rows

    def num_pages(self, num_tokens: int) -> int:
        """KV blocks for the inputs of a request with so many tokens: of those since the last grid point."""
        return self._pages.num_pages_for(num_tokens % self._chunk_size)

    def num_missing(self, allocation: Allocation, num_inputs: int) -> int:
        """Pages that the request lacks for the first `num_inputs` tokens of its chunk."""
        return max(0, self._pages.num_pages_for(num_inputs) - len(allocation.pages))

    def grow(self, allocation: Allocation, num_inputs: int) -> None:
        """Allocate the missing pages."""
        if num_missing := self.num_missing(allocation, num_inputs):
            first = len(allocation.pages)
            allocation.pages += self._kv_blocks.allocate_memory_blocks(num_missing)
            self.array[allocation.row, first : len(allocation.pages)] = allocation.pages[first:]

    def grow_for_drafts(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> Sequence[int]:
        """Allocate pages for drafts, as far as blocks are free; returns the drafts whose inputs have room."""
        if not self._pages.tokens:
            return tokens
        num_pages = len(scheduled.allocation.pages) + self._kv_blocks.total_avail
        num_inputs = scheduled.start % self._chunk_size + scheduled.length
        tokens = tokens[: num_pages * self._pages.tokens - num_inputs]
        self.grow(scheduled.allocation, num_inputs + len(tokens))
        return tokens

    def release(self, allocation: Allocation) -> None:
        """Release the pages of a request; launched steps read them before others write."""
        pages, allocation.pages = allocation.pages, []
        self._kv_blocks.release_memory_blocks(pages)

    def check_integrity(self, allocation: Allocation) -> None:
        """Raise AssertionError where a request has other pages than its row, too many or too few."""
        pages = allocation.pages
        assert len(pages) <= self._pages.per_chunk, "a row has too many pages"
        assert self.array[allocation.row, : len(pages)].tolist() == pages, "the page table is off"
        if allocation.decoding:
            assert len(pages) >= self.num_pages(allocation.num_computed), "a row's inputs lie nowhere"


def tokens_of_page(config: InferenceConfig, spec: HybridStateSpec) -> int | None:
    """Tokens whose inputs fit into a KV block of this rank, a chunk's at most; None: any number."""
    if not (config.decodes_by_replay and spec.strided_blocks):
        return 0
    if not page_offsets(spec, 1)[1]:
        return None
    block = spec.kv_block_bytes(config.block_size_tokens)
    sizes = range(spec.chunk_tokens(config.block_size_tokens), 0, -1)
    return next((size for size in sizes if page_offsets(spec, size)[1] <= block), 0)


def page_offsets(spec: HybridStateSpec, num_tokens: int) -> tuple[dict[str, int], int]:
    """Where the inputs of a page of tokens begin, each with all its layers; and the page's bytes."""
    offsets, end = {}, 0
    for tensor in spec.states:
        for entry in tensor.inputs:
            if entry.layout == "page":
                offsets[entry.name] = end
                size = tensor.num_layers * num_tokens * math.prod(entry.shape) * entry.dtype.itemsize
                end += ceil_div(size, STATE_ALIGNMENT) * STATE_ALIGNMENT
    return offsets, end


def input_shapes(config: InferenceConfig, spec: HybridStateSpec, paged: bool = False) -> InputShapes:
    """Name -> [layers, rows, *shape of one request] and dtype of the inputs, with padded drafts.

    `paged`: without the inputs that can lie in pages.
    """
    if not config.decodes_by_replay:
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
        if not (paged and entry.layout == "page")
    }


def input_bytes(shapes: InputShapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
