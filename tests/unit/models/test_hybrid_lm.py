"""The model against a token-by-token recurrence that shares no code with it."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.models import HybridConfig, HybridLM, hybrid_lm
from oracle.budget import costly, is_quick
from oracle.counting_kernels import CountingKernels
from oracle.recurrent_lm import RecurrentLM
from oracle.steps import Row, build_step, make_caches
from torch import Tensor

BLOCK = 32
LENGTH = 90
few = settings(costly(), derandomize=True)


def random_tokens(n: int, seed: int, vocab_size: int = 256) -> list[int]:
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Server:
    """A model with its caches, full of NaN where nothing was written."""

    def __init__(self, model: HybridLM, slots: int = 8, blocks: int = 16) -> None:
        self.model, self.spec = model, model.state_spec()
        self.pool, self.kv_cache = make_caches(self.spec, slots, blocks, BLOCK, fill=math.nan)

    def step(self, *rows: Row) -> Tensor:
        return self.model(build_step(self.spec, self.pool, self.kv_cache, BLOCK, rows))

    def run(self, tokens, cuts=(), blocks=(0, 1, 2), slot=0, decode=False) -> Tensor:
        """All logits of one sequence, prefilled in the pieces between `cuts`, or decoded after the first."""
        bounds = [0, *cuts, len(tokens)]
        return torch.cat(
            [
                self.step(
                    Row(
                        tokens[begin:end],
                        begin,
                        slot if begin else -1,
                        slot,
                        blocks,
                        decode=decode and begin > 0,
                        logits="all",
                    )
                )
                for begin, end in itertools.pairwise(bounds)
            ]
        )


@pytest.fixture(scope="module", params=["M-M*-M-", "MG-C-G*-"])
def model(request) -> HybridLM:
    return HybridLM(HybridConfig.tiny(torch.float64, pattern=request.param))


@pytest.fixture(scope="module")
def oracle(model) -> RecurrentLM:
    return RecurrentLM(model)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(LENGTH, seed=1)


@pytest.fixture(scope="module")
def expected(oracle, tokens) -> Tensor:
    return oracle.logits(tokens)


def assert_states(pool, slot: int, states: dict[str, Tensor]) -> None:
    assert all_states(pool).keys() == states.keys()
    for name, expected in states.items():
        torch.testing.assert_close(pool[name][:, slot], expected, rtol=0, atol=1e-11)


def all_states(pool) -> dict[str, Tensor]:
    return {tensor.name: pool[tensor.name] for tensor in pool.states}


CONFIGS = {
    "tiny": {},
    "odd sizes": {
        "pattern": "*M-MM*", "hidden_size": 40, "vocab_size": 33, "mamba_num_heads": 6,
        "mamba_head_dim": 5, "mamba_num_groups": 3, "mamba_state_dim": 7, "conv_kernel": 2,
        "ssd_chunk_size": 5, "num_attention_heads": 6, "num_kv_heads": 1, "head_dim": 6,
    },
    "one head, one group, long kernel": {
        "mamba_num_heads": 1, "mamba_num_groups": 1, "conv_kernel": 6, "num_kv_heads": 4,
    },
    "no attention": {"pattern": "MM"},
    "no Mamba": {"pattern": "*-*"},
    "gated delta net": {"pattern": "G-G*"},
    "gated delta net, odd sizes": {
        "pattern": "GG", "delta_num_key_heads": 3, "delta_key_dim": 5, "delta_num_value_heads": 6,
        "delta_value_dim": 7, "delta_chunk_size": 5, "conv_kernel": 2,
    },
    "short convolutions": {"pattern": "C*C", "short_conv_kernel": 5},
    "chunks of two sizes": {"pattern": "GM", "ssd_chunk_size": 12, "delta_chunk_size": 6},
}  # fmt: skip


class TestAgainstTheRecurrence:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_logits_and_states_of_a_long_prefill(self, name):
        config = HybridConfig.tiny(torch.float64, **CONFIGS[name])
        model = HybridLM(config, seed=3)
        tokens = random_tokens(120 if is_quick() else 300, seed=2, vocab_size=config.vocab_size)
        oracle = RecurrentLM(model)
        server = Server(model)
        error = (server.run(tokens, blocks=range(10)) - oracle.logits(tokens)).abs().max().item()
        print(f"largest error against the recurrence, {name}, float64, {len(tokens)} tokens: {error:.2e}")
        assert error < 1e-11
        assert_states(server.pool, 0, oracle.states_after(tokens))

    @few
    @given(st.sets(st.integers(1, LENGTH - 1), max_size=8))
    @example({1, 2, 3, 4, 6, 9})
    @example({16, 32, 33, 35, 38, 48})
    @example({LENGTH - 1})
    def test_a_prefill_cut_anywhere(self, model, tokens, expected, cuts):
        out = Server(model).run(tokens, sorted(cuts))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)

    @pytest.mark.sampled
    @pytest.mark.parametrize("decode", [True, False], ids=["decode rows", "prefills of one token"])
    def test_token_by_token(self, model, oracle, tokens, expected, decode):
        server = Server(model)
        out = server.run(tokens, range(1, LENGTH), decode=decode)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
        assert_states(server.pool, 0, oracle.states_after(tokens))

    @few
    @given(data=st.data())
    def test_rows_of_different_sequences_packed_into_one_step(self, model, data):
        """Decode and prefill rows, some fresh, each from its own source into another pool index."""
        kinds = data.draw(st.lists(st.sampled_from(["decode", "fresh", "resumed"]), min_size=1, max_size=5))
        kinds.sort(key=lambda kind: kind != "decode")
        server = Server(model, slots=10)
        rows, histories = [], []
        for i, kind in enumerate(kinds):
            before = 0 if kind == "fresh" else data.draw(st.integers(1, 33))
            new = 1 if kind == "decode" else data.draw(st.integers(1, 30))
            history = random_tokens(before + new, seed=20 + i)
            blocks = (3 * i, 3 * i + 1)
            if before:
                server.step(Row(history[:before], 0, -1, i, blocks))
            source = i if before else -1
            rows.append(
                Row(history[before:], before, source, 5 + i, blocks, decode=kind == "decode", logits="all")
            )
            histories.append(history)
        sources = {name: tensor[:, :5].clone() for name, tensor in all_states(server.pool).items()}
        out = server.step(*rows).split([len(row.tokens) for row in rows])
        oracle = RecurrentLM(model)
        for i, row in enumerate(rows):
            expected = oracle.logits(histories[i])[row.start :]
            torch.testing.assert_close(out[i], expected, rtol=0, atol=1e-11)
            assert_states(server.pool, 5 + i, oracle.states_now())
        for name, tensor in all_states(server.pool).items():
            torch.testing.assert_close(tensor[:, :5], sources[name], rtol=0, atol=0, equal_nan=True)

    def test_generate_greedy_is_the_argmax_of_the_logits(self, oracle, tokens):
        generated, log_probs = oracle.generate_greedy(tokens, 5)
        logits = oracle.logits(tokens + generated)[LENGTH - 1 : -1]
        assert logits.argmax(-1).tolist() == generated
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected)


class TestCheckpoints:
    def test_inside_a_prefill_and_resuming_from_them(self, model, oracle, tokens, expected):
        server = Server(model)
        server.step(Row(tokens[:10], 0, -1, 0, (0, 1, 2)))
        server.step(Row(tokens[10:], 10, 0, 0, (0, 1, 2), checkpoints={16: 1, 32: 2, 80: 3}))
        for position, slot in ((16, 1), (32, 2), (80, 3)):
            assert_states(server.pool, slot, oracle.states_after(tokens[:position]))
            resumed = server.step(Row(tokens[position:], position, slot, 4, (0, 1, 2), logits="all"))
            torch.testing.assert_close(resumed, expected[position:], rtol=0, atol=1e-11)
        assert_states(server.pool, 0, oracle.states_after(tokens))

    def test_taking_them_changes_nothing_else(self, model, tokens):
        with_them, without = Server(model), Server(model)
        row = Row(tokens, 0, -1, 0, (0, 1, 2), logits="all")
        out = without.step(row)
        taken = Row(tokens, 0, -1, 0, (0, 1, 2), logits="all", checkpoints={48: 1, 64: 2})
        assert torch.equal(with_them.step(taken), out)
        for name, tensor in all_states(with_them.pool).items():
            assert torch.equal(tensor[:, 0], without.pool[name][:, 0])
            assert tensor[:, 3:].isnan().all()


class TestStep:
    def test_only_the_wanted_tokens_pass_the_head(self, model, tokens, expected):
        server = Server(model)
        out = server.step(
            Row(tokens[:20], 0, -1, 0, (0, 1, 2), logits="none"),
            Row(tokens[:30], 0, -1, 1, (3, 4, 5), logits="last"),
            Row(tokens[:3], 0, -1, 2, (6,), logits="all"),
        )
        torch.testing.assert_close(out, expected[[29, 0, 1, 2]], rtol=0, atol=1e-11)

    def test_keys_of_tokens_recomputed_in_shared_blocks_are_not_written_again(self, model, tokens, expected):
        server = Server(model)
        server.run(tokens)
        before = server.kv_cache.clone()
        row = Row(tokens, 0, -1, 1, (0, 1, 5), kv_from=64, logits="all")
        torch.testing.assert_close(server.step(row), expected, rtol=0, atol=1e-11)
        assert torch.equal(server.kv_cache[:, :, :2], before[:, :, :2])
        torch.testing.assert_close(
            server.kv_cache[:, :, 5, : LENGTH - 64], before[:, :, 2, : LENGTH - 64], rtol=0, atol=1e-11
        )

    def test_global_random_numbers_and_gradients_are_left_alone(self, tokens):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        model = HybridLM(HybridConfig.tiny())
        out = Server(model).run(tokens)
        assert torch.equal(torch.get_rng_state(), state)
        assert not out.requires_grad
        assert not model.training


def test_each_sum_of_the_residual_stream_is_one_call_with_the_norm_behind_it(monkeypatch):
    kernels = CountingKernels()
    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda *_: kernels)
    Server(HybridLM(HybridConfig.tiny(pattern="M-*-"))).run([1, 2, 3])
    expected = {"rms_norm": 1, "add_rms_norm": 4, "relu_squared": 2, "qk_norm_rotary": 1, "head_product": 1}
    assert kernels.calls == expected


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 1.0), (torch.float16, 0.2)]
    )
    def test_states_and_logits_are_never_below_float32(self, dtype, tolerance, tokens):
        model = HybridLM(HybridConfig.tiny(dtype))
        server = Server(model)
        out = server.run(tokens, cuts=(3, 40))
        decoded = server.step(Row([7], LENGTH, 0, 1, (0, 1, 2), decode=True))
        assert out.dtype == decoded.dtype == torch.float32
        assert server.pool["ssm"].dtype == torch.float32
        assert server.pool["conv"].dtype == server.kv_cache.dtype == dtype
        error = (torch.cat([out, decoded]) - RecurrentLM(model).logits([*tokens, 7])).abs().max().item()
        print(f"largest error against the recurrence, {dtype}: {error:.2e}")
        assert error < tolerance

    def test_weights_are_the_same_up_to_rounding(self):
        exact = HybridLM(HybridConfig.tiny(torch.float64), seed=4).state_dict()
        for dtype in (torch.float32, torch.bfloat16):
            for name, weight in HybridLM(HybridConfig.tiny(dtype), seed=4).state_dict().items():
                assert torch.equal(weight, exact[name].to(weight.dtype)), name

    def test_weights_depend_on_the_seed_alone(self):
        torch.manual_seed(1)
        first = HybridLM(HybridConfig.tiny(), seed=4).lm_head
        torch.manual_seed(2)
        assert torch.equal(first, HybridLM(HybridConfig.tiny(), seed=4).lm_head)
        assert not torch.equal(first, HybridLM(HybridConfig.tiny(), seed=5).lm_head)


class TestTheCachesMatter:
    """A wrong state must not go unnoticed: neither in logits nor in the tokens of greedy decoding."""

    POSITION = 60

    def test_losing_one_changes_many_of_the_next_tokens(self, model, tokens, expected):
        for lost in (*all_states(Server(model).pool), "kv"):
            server = Server(model)
            server.step(Row(tokens[: self.POSITION], 0, -1, 0, (0, 1, 2)))
            (all_states(server.pool) | {"kv": server.kv_cache})[lost].zero_()
            out = server.step(Row(tokens[self.POSITION :], self.POSITION, 0, 0, (0, 1, 2), logits="all"))
            changed = (out.argmax(-1) != expected[self.POSITION :].argmax(-1)).double().mean().item()
            print(f"tokens changed by losing {lost}: {changed:.0%}")
            window_of_two_tokens = lost == "short_conv"
            assert changed > (0.05 if window_of_two_tokens else 0.2), lost

    @pytest.mark.parametrize("tokens_missed", [1, 16])
    def test_so_does_a_state_of_some_tokens_earlier(self, model, tokens, expected, tokens_missed):
        server = Server(model)
        server.step(Row(tokens[: self.POSITION], 0, -1, 0, (0, 1, 2)))
        server.step(Row(tokens[: self.POSITION - tokens_missed], 0, -1, 0, (0, 1, 2)))
        out = server.step(Row(tokens[self.POSITION :], self.POSITION, 0, 0, (0, 1, 2), logits="all"))
        changed = (out.argmax(-1) != expected[self.POSITION :].argmax(-1)).double().mean().item()
        print(f"tokens changed by a state {tokens_missed} tokens old: {changed:.0%}")
        assert changed > 0.1

    def test_memory_spans_hundreds_of_tokens_in_some_heads_and_tens_in_others(self, model):
        for name, A_log in model.state_dict().items():
            if name.endswith("A_log"):
                dt = torch.nn.functional.softplus(model.state_dict()[name.replace("A_log", "dt_bias")])
                memory = 1 / (A_log.exp() * dt)
                assert memory.max() > 300
                assert memory.min() < 30

    def test_logits_are_a_few_units_wide_and_greedy_decoding_does_not_stand_still(self, oracle, expected):
        assert 1.0 < expected.std() < 10.0
        generated, _ = oracle.generate_greedy(b"Hello, how are you today?", 60)
        assert len(set(generated)) > 20


class TestConfig:
    def test_the_spec_says_what_a_sequence_costs(self):
        spec = HybridLM(HybridConfig.tiny(torch.bfloat16)).state_spec()
        conv, ssm = spec.states
        assert (conv.num_layers, ssm.num_layers, spec.num_attention_layers) == (3, 3, 1)
        assert (conv.shape, ssm.shape) == ((192, 3), (8, 16, 16))
        assert (conv.dtype, ssm.dtype) == (torch.bfloat16, torch.float32)
        assert (conv.grid, ssm.grid) == (1, 16)
        assert (spec.num_kv_heads, spec.head_dim, spec.kv_dtype) == (2, 16, torch.bfloat16)
        assert (spec.chunk_size, spec.vocab_size, spec.device) == (16, 256, torch.device("cpu"))

    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("vocab_size", 0), ("hidden_size", 1.5), ("pattern", "M?"), ("pattern", ""), ("pattern", None),
            ("conv_kernel", 1), ("mamba_num_heads", 7), ("num_attention_heads", 3), ("head_dim", 15),
            ("norm_eps", -1.0), ("rotary_base", 0.0), ("dtype", torch.int64),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_named_with_what_is_accepted(self, override, value):
        arguments = {"dtype": torch.float32, override: value}
        with pytest.raises(ValueError, match=rf"{override} is .*; accepted: "):
            HybridConfig.tiny(**arguments)

    def test_a_wrong_device_is_refused(self):
        with pytest.raises(ValueError, match="device is 'nowhere'; accepted: "):
            HybridLM(HybridConfig.tiny(), device="nowhere")

    @pytest.mark.gpu
    def test_weights_drawn_on_a_gpu_are_as_wide_as_those_of_a_cpu(self):
        drawn, usual = HybridLM(HybridConfig.tiny(), device="cuda"), HybridLM(HybridConfig.tiny())
        for name, weight in drawn.state_dict().items():
            assert weight.is_cuda
            torch.testing.assert_close(
                weight.std().cpu(), usual.state_dict()[name].std(), rtol=0.2, atol=0.02
            )

    def test_a_wrong_seed_is_refused(self):
        with pytest.raises(ValueError, match="seed is -1; accepted: "):
            HybridLM(HybridConfig.tiny(), seed=-1)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("mamba_num_heads", "8; accepted: a multiple of the 3 ranks of the tensor group"),
        ("num_kv_heads", "2; accepted: a multiple or a divisor of the 3 ranks of the tensor group"),
    ],
)
def test_a_size_that_ranks_cannot_divide_is_named(name: str, accepted: str) -> None:
    ranks: Any = SimpleNamespace(tensor_rank=1, tensor_size=3)
    with pytest.raises(ValueError, match=f"{name} is {accepted}"):
        HybridConfig.tiny().part_of(name, ranks)
