"""Stores of keys and values: the Triton kernels and the reference against loops."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import write_kv as triton_kernels
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.budget import costly

BLOCK, KV_HEADS, DIM, BLOCKS, TOKENS = 4, 3, 10, 6, 9


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    return request.param


@pytest.fixture(params=[KernelSet, triton_kernels], ids=["reference", "triton"])
def kernels(request) -> Any:
    return request.param


@pytest.mark.sampled
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [1, 3, 120])
def test_listed_tokens_are_stored_rounded_and_a_new_block_ends_with_zeros(device, kernels, cached, kv_heads):
    """Widths of less than a program's block, and of more than one; -1 and repeated tokens among them."""
    generator = torch.Generator().manual_seed(kv_heads)
    drawn = torch.randn(2, TOKENS, kv_heads, DIM, generator=generator)
    keys, values = drawn[0].to(device), drawn[1].to(cached).to(device)
    if device == "cpu" and cached is torch.bfloat16:
        keys = keys.bfloat16().float()  # the interpreter cuts bits off where a GPU rounds
    keys[8] = math.nan  # listed nowhere but with -1
    cache = torch.full((2, BLOCKS, BLOCK, kv_heads, DIM), math.nan, dtype=cached, device=device)
    expected = cache.clone()
    pairs = [(3, 9), (3, 10), (8, -1), (0, 0), (1, 1), (7, 23), (2, 16), (8, -1)]
    for block, offset in ((0, 2), (4, 1)):  # behind the last entries of blocks whose row 0 is stored
        expected[:, block, offset:] = 0
    for token, position in pairs:
        if position >= 0:
            expected[0, position // BLOCK, position % BLOCK] = keys[token].to(cached)
            expected[1, position // BLOCK, position % BLOCK] = values[token]
    tokens, positions = torch.tensor(pairs, device=device).T.contiguous()
    kernels.write_kv(cache, keys, values, tokens, positions)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_a_view_of_tokens_and_of_one_layer(device, kernels):
    keys = torch.randn(TOKENS, 2 * KV_HEADS, DIM, device=device)[:, KV_HEADS:]
    caches = torch.zeros(2, 2, BLOCKS, BLOCK, KV_HEADS, DIM, device=device)
    index = torch.tensor([5, 2], device=device)
    values = (keys * 2).transpose(0, 1).contiguous().transpose(0, 1)
    kernels.write_kv(caches[1], keys, values, index, index + 7)
    assert torch.equal(caches[1, 0, 3, 0], keys[5])
    assert torch.equal(caches[1, 1, 2, 1], 2 * keys[2])
    assert caches[0].count_nonzero() == 0
    assert caches[1].count_nonzero() == 4 * KV_HEADS * DIM


def test_blocks_with_gaps_between_them_get_what_blocks_without_get(device, kernels):
    """All layers of a block stand together, as in a memory that KV shares with states."""
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, TOKENS, KV_HEADS, DIM, generator=generator).to(device)
    layers, gap = 3, 7
    part = BLOCK * KV_HEADS * DIM
    memory = torch.full((BLOCKS, 2 * layers * part + gap), math.nan, device=device)
    strides = 2 * part, part, memory.stride(0), KV_HEADS * DIM, DIM, 1
    strided = memory.as_strided((layers, 2, BLOCKS, BLOCK, KV_HEADS, DIM), strides)[1]
    dense = torch.full(strided.shape, math.nan, device=device)
    pairs = [(3, 9), (3, 10), (8, -1), (0, 0), (1, 1), (7, 23), (2, 16), (8, -1)]
    tokens, places = torch.tensor(pairs, device=device).T.contiguous()
    for cache in (strided, dense):
        kernels.write_kv(cache, keys, values, tokens, places)
    torch.testing.assert_close(strided, dense, rtol=0, atol=0, equal_nan=True)
    assert memory.isfinite().sum() == dense.isfinite().sum() > 0


def test_nothing_to_write(device, kernels):
    cache = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM, device=device)
    keys, none = torch.ones(0, KV_HEADS, DIM, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    kernels.write_kv(cache, keys, keys, none, none)
    kernels.write_kv(cache, keys, keys, none.new_zeros(3), none.new_full((3,), -1))
    assert cache.count_nonzero() == 0


@dataclass
class Sequence:
    """A sequence's blocks in order, and how many of its tokens are stored."""

    blocks: list[int] = field(default_factory=list)
    stored: int = 0


class Steps:
    """A cache full of NaN, and steps of several sequences; a sequence that leaves makes its blocks NaN."""

    def __init__(self, block: int, write: Callable[..., None], device: str) -> None:
        self._block, self._write, self._device = block, write, device
        self.cache = torch.full((2, 24, block, 1, 2), math.nan, device=device)
        self.expected = self.cache.clone()
        self._free = list(range(23, -1, -1))
        self.sequences: list[Sequence] = []
        self._count = 0.0

    def step(self, work: list[tuple[Sequence, int, int]], padding: int) -> None:
        """Store, for each sequence, that many tokens behind its stored ones, and forget some of the last."""
        values, positions = [], []
        for sequence, new, rejected in work:
            for position in range(sequence.stored, sequence.stored + new):
                if position // self._block == len(sequence.blocks):
                    sequence.blocks.append(self._free.pop())
                block, offset = sequence.blocks[position // self._block], position % self._block
                if offset == 0:
                    self.expected[:, block] = 0.0
                self._count += 1
                self.expected[0, block, offset] = self._count
                self.expected[1, block, offset] = -self._count
                values.append(self._count)
                positions.append(block * self._block + offset)
            sequence.stored += max(0, new - rejected)
        keys = torch.tensor([*values, math.nan], device=self._device)[:, None, None].expand(-1, 1, 2)
        tokens = [*range(len(values)), *[len(values)] * padding]
        entries = [tokens, positions + [-1] * padding]
        index = torch.tensor(entries, dtype=torch.int64, device=self._device)
        self._write(self.cache, keys, -keys, index[0], index[1])

    def leave(self, sequence: Sequence) -> None:
        """An invalid request: its KV is NaN when its blocks are free again."""
        self.sequences.remove(sequence)
        for cache in (self.cache, self.expected):
            cache[:, sequence.blocks] = math.nan
        self._free += sequence.blocks

    def check(self) -> None:
        torch.testing.assert_close(self.cache, self.expected, rtol=0, atol=0, equal_nan=True)
        held = [block for sequence in self.sequences for block in sequence.blocks]
        assert self.cache[:, held].isfinite().all()

    @property
    def room(self) -> int:
        return len(self._free) * self._block


@settings(costly(), derandomize=True)
@given(data=st.data(), block=st.sampled_from([1, 2, 3, 8]), triton=st.booleans())
def test_every_row_of_a_block_with_a_stored_row_is_finite_after_every_step(data, block, triton):
    """Prompts in chunks, decodes, drafts of which some are rejected, and blocks used again."""
    kernels = triton_kernels if triton else KernelSet
    device = "cuda" if torch.cuda.is_available() and triton else "cpu"
    steps = Steps(block, kernels.write_kv, device)
    with mock.patch.object(triton_kernels, "MAX_PARTS", 2):
        run_steps(steps, block, data)


def run_steps(steps: Steps, block: int, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        if steps.sequences and data.draw(st.booleans()):
            steps.leave(data.draw(st.sampled_from(steps.sequences)))
        steps.sequences += [Sequence() for _ in range(data.draw(st.integers(0, 2)))]
        work = []
        room = steps.room
        for sequence in data.draw(st.permutations(steps.sequences)):
            new = data.draw(st.integers(0, min(10, max(0, room - block))))
            room -= new + block
            work.append((sequence, new, data.draw(st.integers(0, min(3, max(0, new - 1))))))
        steps.step(work, data.draw(st.integers(0, 3)))
        steps.check()


@pytest.mark.gpu
def test_positions_beyond_two_to_the_31(needs_gpu_memory):
    """Of keys and of values: the cache of each has more elements than 31 bits can count."""
    needs_gpu_memory(14)
    cache = torch.zeros(2, 2**31 // (256 * 1024) + 1, 256, 8, 128, dtype=torch.bfloat16, device="cuda")
    keys = torch.randn(2, 8, 128, device="cuda")
    tokens = torch.tensor([1, 0], device="cuda")
    last = cache[0].numel() // 1024 - 1
    triton_kernels.write_kv(cache, keys, -keys, tokens, torch.tensor([last, 3], device="cuda"))
    assert torch.equal(cache[0, -1, -1], keys[1].bfloat16())
    assert torch.equal(cache[1, -1, -1], -keys[1].bfloat16())
    assert torch.equal(cache[0, 0, 3], keys[0].bfloat16())
    assert cache[:, :-1].view(torch.int16).count_nonzero() <= 2 * 1024
    cache[:, -1] = math.nan
    places = torch.tensor([last - 255, last - 254], device="cuda")
    triton_kernels.write_kv(cache, keys, -keys, tokens, places)
    assert torch.equal(cache[0, -1, :2], keys[[1, 0]].bfloat16())
    assert cache[:, -1, 2:].count_nonzero() == 0
