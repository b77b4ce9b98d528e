"""The Triton store of keys and values against a loop, bit for bit."""

import math

import pytest
import torch
from mambaslots.inference.kernels.write_kv import write_kv

BLOCK, KV_HEADS, DIM, BLOCKS, TOKENS = 4, 3, 10, 6, 9


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    return request.param


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [1, 3, 120])
def test_listed_tokens_are_stored_rounded_and_nothing_else(device, cached, kv_heads):
    """Widths of less than a program's block, and of more than one; -1 and repeated tokens among them."""
    generator = torch.Generator().manual_seed(kv_heads)
    drawn = torch.randn(2, TOKENS, kv_heads, DIM, generator=generator)
    keys, values = drawn[0].to(device), drawn[1].to(cached).to(device)
    if device == "cpu" and cached is torch.bfloat16:
        keys = keys.bfloat16().float()  # the interpreter cuts bits off where a GPU rounds
    keys[8] = math.nan  # listed nowhere but with -1
    cache = torch.full((2, BLOCKS, BLOCK, kv_heads, DIM), math.nan, dtype=cached, device=device)
    expected = cache.clone()
    pairs = [(3, 9), (8, -1), (0, 0), (7, 23), (3, 10), (8, -1)]
    for token, position in pairs:
        if position >= 0:
            expected[0, position // BLOCK, position % BLOCK] = keys[token].to(cached)
            expected[1, position // BLOCK, position % BLOCK] = values[token]
    tokens, positions = torch.tensor(pairs, device=device).T.contiguous()
    write_kv(cache, keys, values, tokens, positions)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_a_view_of_tokens_and_of_one_layer(device):
    keys = torch.randn(TOKENS, 2 * KV_HEADS, DIM, device=device)[:, KV_HEADS:]
    caches = torch.zeros(2, 2, BLOCKS, BLOCK, KV_HEADS, DIM, device=device)
    index = torch.tensor([5, 2], device=device)
    write_kv(caches[1], keys, keys * 2, index, index + 7)
    assert torch.equal(caches[1, 0, 3, 0], keys[5])
    assert torch.equal(caches[1, 1, 2, 1], 2 * keys[2])
    assert caches[0].count_nonzero() == 0
    assert caches[1].count_nonzero() == 4 * KV_HEADS * DIM


def test_nothing_to_write(device):
    cache = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM, device=device)
    keys, none = torch.ones(0, KV_HEADS, DIM, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    write_kv(cache, keys, keys, none, none)
    write_kv(cache, keys, keys, none.new_zeros(3), none.new_full((3,), -1))
    assert cache.count_nonzero() == 0


@pytest.mark.gpu
def test_positions_beyond_two_to_the_31():
    """Of keys and of values: the cache of each has more elements than 31 bits can count."""
    cache = torch.zeros(2, 2**31 // (256 * 1024) + 1, 256, 8, 128, dtype=torch.bfloat16, device="cuda")
    keys = torch.randn(2, 8, 128, device="cuda")
    tokens = torch.tensor([1, 0], device="cuda")
    write_kv(cache, keys, -keys, tokens, torch.tensor([cache[0].numel() // 1024 - 1, 3], device="cuda"))
    assert torch.equal(cache[0, -1, -1], keys[1].bfloat16())
    assert torch.equal(cache[1, -1, -1], -keys[1].bfloat16())
    assert torch.equal(cache[0, 0, 3], keys[0].bfloat16())
    assert cache[:, :-1].view(torch.int16).count_nonzero() <= 2 * 1024
