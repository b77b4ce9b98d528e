"""Gated delta nets of megatron-core with a prefix cache: answers are those without one.

Versions before 0.20 serve none: `MEGATRON=CHECKOUT pytest tests/mcore` with the main branch runs all.
"""

import math
from random import Random
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
import torch
from mambaslots.mcore import versions
from mambaslots.mcore.gated_delta_net import run_in_pieces
from mambaslots.mcore.recurrence import SERIES
from mcore_rig import Served, fla_stand_ins

SHAPE = mcore_rig.SHAPES["tiny gdn"]
BLOCK = SHAPE.block
served_by_host = pytest.mark.skipif(SERIES == "0.19", reason="megatron-core 0.19 serves no gated delta nets")


def tokens(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(256), k=length)


@pytest.fixture(scope="module")
def nets(machine: None) -> Any:
    return mcore_rig.hybrid_model(shape=SHAPE)


# ---- the pieces of a prefill


@pytest.mark.parametrize("seed", range(20))
def test_pieces_compute_what_the_recurrence_does(seed: int) -> None:
    """Random lengths and checkpoints, also none, of float64 sequences with states; padding behind them."""
    choose, draw = Random(seed), torch.Generator().manual_seed(seed)
    lengths = [choose.randrange(1, 200) for _ in range(choose.randrange(1, 4))]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = [
        starts[i] + 64 * chunk
        for i, length in enumerate(lengths)
        for chunk in range(1, length // 64 + 1)
        if choose.random() < 0.6
    ]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    padded = starts[-1] + 5
    heads = {"A_log": normal(4), "dt_bias": normal(4)}
    flags = dict.fromkeys(
        ["output_final_state", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"],
        True,
    )
    initial = normal(len(lengths), 4, 8, 6)
    packed = {"q": normal(1, padded, 2, 8), "k": normal(1, padded, 2, 8), "v": normal(1, padded, 4, 6)}
    packed |= {"g": normal(1, padded, 4), "beta": normal(1, padded, 4)}
    whole = packed | heads | flags | {"initial_state": initial, "cu_seqlens": torch.tensor(starts)}
    output, final = fla_stand_ins.chunk_gated_delta_rule(**whole)
    ours, ours_final, reached = run_in_pieces(
        fla_stand_ins.chunk_gated_delta_rule, dict(whole), starts, positions
    )
    torch.testing.assert_close(ours, output, rtol=0, atol=1e-9)
    torch.testing.assert_close(ours_final, final, rtol=0, atol=1e-9)
    for position in positions:
        row = max(i for i, start in enumerate(starts) if start < position)
        part = {name: each[:, starts[row] : position] for name, each in packed.items()}
        _, state = fla_stand_ins.chunk_gated_delta_rule(
            **part, **heads, **flags, initial_state=initial[row : row + 1]
        )
        torch.testing.assert_close(reached[position], state[0], rtol=0, atol=1e-9)


# ---- served


class Compared:
    """An engine with a cache, and one without, which is asked the same."""

    def __init__(self, model: Any, **sizes: Any) -> None:
        self._plain = mcore_rig.make_engine(model, prefix_caching=False)
        self._cached = mcore_rig.make_engine(model, **sizes)

    def serve(self, prompts: list[list[int]], new_tokens: int = 3) -> list[Served]:
        """All prompts at once; they are answered alike, and the cache is in order."""
        numbers, others = (
            [mcore_rig.add(engine, prompt, new_tokens) for prompt in prompts]
            for engine in (self._cached, self._plain)
        )
        done = mcore_rig.finish(self._cached) | mcore_rig.finish(self._plain)
        for number, other in zip(numbers, others, strict=True):
            assert done[number].tokens == done[other].tokens
            pairs = zip(done[number].log_probs, done[other].log_probs, strict=True)
            assert all(math.isclose(one, two, abs_tol=1e-4) for one, two in pairs)
        self._cached.context.mamba_slot_allocator.check_integrity()
        return [done[number] for number in numbers]

    @property
    def num_resumed(self) -> int:
        return mambaslots.mcore.stats(self._cached.context).num_resumed_tokens


@served_by_host
def test_a_conversation_resumes_where_it_branches(nets: Any) -> None:
    said = tokens(2 * BLOCK + 9, 1)
    with mambaslots.mcore.installed():
        both = Compared(nets, num_mamba_slots=16)
        resumed = []
        for prompt in (said, said, said[: BLOCK + 3], said[:2], said + tokens(BLOCK, 2)):
            before = both.num_resumed
            (answer,) = both.serve([prompt], new_tokens=BLOCK)
            resumed.append(both.num_resumed - before)
        assert resumed == [0, 2 * BLOCK, 0, 0, 2 * BLOCK]
        both.serve([said + answer.tokens, said + tokens(3, 3), tokens(BLOCK, 4)])


@served_by_host
@pytest.mark.sampled(seed=(0, 1))
@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_of_forks_and_repeats_under_eviction(seed: int, nets: Any) -> None:
    """25 sequences each; 12 KV blocks and 3 slots, so that blocks and states are evicted all the time."""
    choose = Random(seed)
    with mambaslots.mcore.installed():
        both = Compared(nets, num_mamba_slots=3, num_kv_blocks=12)
        for number in range(25):
            known = [tokens(choose.randrange(1, 3 * BLOCK), 1000 * seed + number)]
            for _ in range(3):
                base = choose.choice(known)
                cut = choose.choice([len(base), choose.randrange(1, len(base) + 1)])
                known.append(base[:cut] + tokens(choose.choice([0, 1, 5, BLOCK]), choose.randrange(1 << 30)))
            both.serve(known[:1])
            both.serve(known[1:2])
            both.serve(known[2:])
        assert both.num_resumed > 0


@served_by_host
def test_what_is_not_served_is_refused(nets: Any) -> None:
    plain = mcore_rig.make_engine(nets, num_mamba_slots=4)
    with pytest.raises(AssertionError, match="does not support prefix caching"):
        mcore_rig.serve(plain, [[1, 2, 3]])
    with mambaslots.mcore.installed():
        engine = mcore_rig.make_engine(nets, num_mamba_slots=4, max_tokens=BLOCK, enable_chunked_prefill=True)
        with pytest.raises(AssertionError, match="does not support chunked prefill"):
            mcore_rig.serve(engine, [tokens(2 * BLOCK, 5)])


@served_by_host
def test_a_net_whose_source_is_not_known_stays_uncached(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.KNOWN_SOURCES, "GatedDeltaNet.ssm_prefill", ())  # type: ignore[index]
    with mambaslots.mcore.installed():
        engine = mcore_rig.make_engine(nets, num_mamba_slots=4)
        with pytest.raises(AssertionError, match="does not support prefix caching"):
            mcore_rig.serve(engine, [[1, 2, 3]])
