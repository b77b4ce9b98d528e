"""The parallel forms that training uses, against recurrences token by token that share no code with them."""

import numpy as np
import pytest
import torch
from tiny_training.chunk_scans import scan_gated_delta_rule, scan_ssd

LENGTHS = (1, 7, 16, 45)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (2, 2)])
def test_the_chunks_of_ssd_are_the_recurrence(length: int, heads: int, groups: int) -> None:
    x, dt = normal(2, length, heads, 5, seed=0), normal(2, length, heads, seed=1).exp()
    B, C = normal(2, length, groups, 3, seed=2), normal(2, length, groups, 3, seed=3)
    A, D = -normal(heads, seed=4).exp(), normal(heads, seed=5)
    y = scan_ssd(x, dt, A, B, C, D, chunk=16).numpy()
    for row in range(2):
        for head in range(heads):
            group, state = head * groups // heads, np.zeros((5, 3))
            for t in range(length):
                now, step = x[row, t, head].numpy(), float(dt[row, t, head])
                state = np.exp(step * float(A[head])) * state + step * np.outer(now, B[row, t, group])
                expected = state @ C[row, t, group].numpy() + float(D[head]) * now
                np.testing.assert_allclose(y[row, t, head], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (1, 3), (2, 2)])
def test_the_chunks_of_the_gated_delta_rule_are_the_recurrence(
    length: int, key_heads: int, value_heads: int
) -> None:
    q, k = normal(2, length, key_heads, 4, seed=0), normal(2, length, key_heads, 4, seed=1)
    v = normal(2, length, value_heads, 6, seed=2)
    g, beta = -normal(2, length, value_heads, seed=3).exp(), normal(2, length, value_heads, seed=4).sigmoid()
    o = scan_gated_delta_rule(q, k, v, g, beta, chunk=16).numpy()
    for row in range(2):
        for head in range(value_heads):
            key_head, state = head * key_heads // value_heads, np.zeros((4, 6))
            for t in range(length):
                query, key = q[row, t, key_head].numpy(), k[row, t, key_head].numpy()
                query = query / np.sqrt(query @ query + 1e-6) / 2.0
                key = key / np.sqrt(key @ key + 1e-6)
                state = np.exp(float(g[row, t, head])) * state
                error = v[row, t, head].numpy() - key @ state
                state = state + float(beta[row, t, head]) * np.outer(key, error)
                np.testing.assert_allclose(o[row, t, head], query @ state, rtol=0, atol=1e-10)


def test_keys_that_are_all_alike_do_not_blow_up_in_float32() -> None:
    """The worst case for the inverse within a chunk: a series of powers would cancel huge numbers."""
    k = torch.ones(1, 128, 1, 16)
    v, g, beta = normal(1, 128, 1, 8, seed=0).float(), torch.zeros(1, 128, 1), torch.full((1, 128, 1), 0.9)
    k.requires_grad_()
    o = scan_gated_delta_rule(k, k, v, g, beta, chunk=64)
    o.sum().backward()
    assert o.abs().max() < 10
    assert k.grad is not None
    assert k.grad.isfinite().all()


def test_the_gradient_of_the_gated_delta_rule() -> None:
    shapes = ((1, 9, 1, 3), (1, 9, 1, 3), (1, 9, 2, 2), (1, 9, 2), (1, 9, 2))
    q, k, v, g, beta = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    inputs = [q, k, v, -g.exp(), beta.sigmoid()]
    for tensor in inputs:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: scan_gated_delta_rule(*tensors, chunk=4), inputs)
