"""Sums of dt * A and products of C and B, within chunks, against float64."""

import pytest
import torch
from mambaslots.inference.kernels.ssd_stages import chunk_cumsum, chunk_scores
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations, randn, relative_error, same_bits


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


def cuts_of(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def sums(dt, A, chunk_size, lengths, device):
    with poisoned_allocations():
        found = chunk_cumsum(dt.to(device), A.to(device), chunk_size, cuts_of(lengths, device))
    return [part.cpu() for part in found]


@pytest.mark.sampled(chunk_size=(8, 20), heads=2)
@pytest.mark.parametrize("heads", [1, 3, 40])
@pytest.mark.parametrize("chunk_size", [8, 20, 64])
def test_sums_of_chunks(device, heads, chunk_size):
    """Behind a chunk's tokens steps are 0, and the last sum repeats; an empty chunk has zeros."""
    lengths = [chunk_size, 0, 3, chunk_size - 1]
    dt, A = randn(sum(lengths) + 2, heads, seed=1).abs().float(), -randn(heads, seed=2).abs().float()
    dt[sum(lengths) :] = torch.nan  # padding tokens
    chunk_dt, log_decays = sums(dt, A, chunk_size, lengths, device)
    first = 0
    for chunk, length in enumerate(lengths):
        steps = torch.zeros(chunk_size, heads)
        steps[:length] = dt[first : first + length]
        assert torch.equal(chunk_dt[:, chunk].T, steps)
        expected = (steps.double() * A.double()).cumsum(0)
        assert relative_error(log_decays[:, chunk].T, expected) <= 1e-6
        assert (log_decays[:, chunk, length:] == log_decays[:, chunk, max(0, length - 1) :][:, :1]).all()
        first += length


def test_bits_of_a_sum_do_not_depend_on_what_follows(device):
    dt, A = randn(48, 5, seed=1).abs().float(), -randn(5, seed=2).abs().float()
    _, whole = sums(dt, A, 48, [48], device)
    for length in (1, 7, 16, 33):
        assert same_bits(sums(dt, A, 48, [length], device)[1][:, 0, :length], whole[:, 0, :length])


@pytest.mark.sampled
@pytest.mark.parametrize("operands", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("state_dim", "chunk_size"), [(12, 16), (140, 80)])
def test_scores_of_chunks(device, operands, state_dim, chunk_size):
    """Of all tokens k <= m. Nothing else is promised."""
    dtype = torch.float16 if operands == torch.float32 else operands
    lengths = [chunk_size, 0, 5]
    both = randn(sum(lengths) + 1, 2, 2 * state_dim, seed=1).to(dtype)
    both[-1] = torch.nan
    C, B = both.to(device).split(state_dim, dim=-1)
    with poisoned_allocations():
        CB = chunk_scores(C, B, chunk_size, cuts_of(lengths, device), operands).cpu()
    assert CB.dtype == torch.float32
    first = 0
    for chunk, length in enumerate(lengths):
        queries, keys = (part[first : first + length].double().cpu() for part in (C, B))
        expected = torch.einsum("mgn,kgn->gmk", queries, keys).tril()
        assert relative_error(CB[chunk, :, :length, :length].tril(), expected) <= 1e-6
        first += length


def test_strides_that_cannot_be_read_are_refused():
    C = torch.zeros(5, 2, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"B has strides .* accepted: a last stride of 1"):
        chunk_scores(C, C.mT.contiguous().mT, 16, cuts_of([5], None), torch.float16)
