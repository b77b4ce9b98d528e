"""Refusals, the default, what an earlier start found, and the check of a model with large products."""

import gc
import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots import parallel_groups
from mambaslots.inference.contexts.padding import MIN_CUBLAS_ROWS
from mambaslots.inference.engines.invariance import mode, products
from mambaslots.inference.engines.invariance.mode import BatchInvariance, check_settings, decide
from mambaslots.inference.engines.invariance.products import BatchVarianceError, Product
from mambaslots.inference.engines.invariance.switches import (
    SWITCHES,
    check_switches,
    read_switch,
    write_switches,
)
from oracle.checked_model import CONFIG, model_of, on


class TestRefusals:
    def test_a_cpu(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(
            ValueError, match="batch_invariant is True, and the model is on cpu; accepted: a GPU"
        ):
            check_settings(model_of("M").state_spec())
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        check_settings(model_of("M").state_spec())
        BatchInvariance(model_of("M"), model_of("M").state_spec(), CONFIG)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_wide_models(self, dtype):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ValueError, match=f"the model is {name}; accepted: bfloat16 or float16"):
            check_settings(on("cuda", model_of("M", dtype)))

    def test_attention_without_flash_attention(self, monkeypatch):
        monkeypatch.setattr(mode.attention, "flash_rejection", lambda *_: "FlashAttention-3 needs x")
        with pytest.raises(ValueError, match="and FlashAttention-3 needs x; accepted: a model that FlashAtt"):
            check_settings(on("cuda", model_of("M*")))
        check_settings(on("cuda", model_of("MG")))

    def test_tensor_ranks(self, monkeypatch):
        as_they_come = ms.ParallelGroups()
        for num_ranks, groups in ((2, as_they_come), (4, ms.ParallelGroups(ordered_sums=True))):
            monkeypatch.setattr(ms.ParallelGroups, "tensor_size", num_ranks)
            check_settings(on("cuda", model_of("M-"), groups=groups))
        with pytest.raises(
            ValueError, match="ordered_sums of the model's ParallelGroups is False with 4 tensor"
        ):
            check_settings(on("cuda", model_of("M-"), groups=as_they_come))

    def test_ordered_sums_is_a_bool(self):
        with pytest.raises(ValueError, match="ordered_sums is 1; accepted: True or False"):
            ms.ParallelGroups(ordered_sums=1)  # type: ignore[arg-type]


class TestDefault:
    """`batch_invariant=None`: on where it can be, else off with the reason."""

    @pytest.fixture(autouse=True)
    def no_gpu_is_needed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        before = {name: read_switch(name) for name in SWITCHES}
        for module in (mode, parallel_groups):
            monkeypatch.setattr(module, "on_device_of", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield
        write_switches(before)

    @pytest.fixture
    def checks(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Which parts of the check have run; they find nothing."""
        made: list[str] = []

        def parts(invariance: BatchInvariance, *_: object) -> None:
            made.append("parts")
            invariance.products = ("aten.mm of something",)

        monkeypatch.setattr(BatchInvariance, "_check_parts", parts)
        monkeypatch.setattr(BatchInvariance, "_check_forwards", lambda *_: made.append("forwards"))
        return made

    def test_a_cpu_and_rounded_states_have_none(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # which is for those that ask
        engine = ms.DynamicInferenceEngine(model_of("M"), CONFIG)
        assert engine.config.batch_invariant is False
        off = "batch invariance: off, because {}; answers may depend on the batch"
        assert engine.describe().splitlines()[-1] == off.format("the model is on cpu")
        engine = ms.DynamicInferenceEngine(model_of("M"), replace(CONFIG, durable_state_dtype="bfloat16"))
        assert engine.describe().splitlines()[-1] == off.format("durable_state_dtype is 'bfloat16'")
        engine = ms.DynamicInferenceEngine(model_of("M"), replace(CONFIG, batch_invariant=False))
        assert engine.describe().splitlines()[-1] == off.format("the setting is False")

    @pytest.mark.parametrize(
        ("dtype", "changes", "reason"),
        [
            (torch.float32, {}, "the model is float32"),
            (torch.bfloat16, {"max_tokens_per_step": 16}, "max_tokens_per_step is 16"),
        ],
    )
    def test_what_the_model_or_a_size_rules_out(self, checks, dtype, changes, reason):
        model, config = model_of("M", dtype), replace(CONFIG, **changes)
        assert decide(model, on("cuda", model), config) == (
            replace(config, batch_invariant=False),
            None,
            reason,
        )
        with pytest.raises(ValueError, match=reason):
            decide(model, on("cuda", model), replace(config, batch_invariant=True))
        assert not checks

    def test_what_the_check_finds(self, checks, monkeypatch):
        def finds(*_: object) -> None:
            raise BatchVarianceError("batch_invariant is True, and a row differs; accepted: another")

        monkeypatch.setattr(BatchInvariance, "_check_forwards", finds)
        model = model_of("M")
        for _ in range(2):  # a refusal leaves no stamp
            config, invariance, reason = decide(model, on("cuda", model), CONFIG)
            assert (config.batch_invariant, invariance, reason) == (False, None, "a row differs")
        assert checks == ["parts", "parts"]
        with pytest.raises(BatchVarianceError, match="a row differs"):
            decide(model, on("cuda", model), replace(CONFIG, batch_invariant=True))

    def test_a_start_after_one_that_passed_does_not_check_again(self, checks, tmp_path):
        model = model_of("M")
        config, invariance, reason = decide(model, on("cuda", model), CONFIG)
        assert (config.batch_invariant, reason, checks) == (True, "", ["parts", "forwards"])
        assert invariance is not None
        assert "as an earlier start found" not in invariance.describe()[0]
        again = decide(model_of("M"), on("cuda", model), CONFIG)[1]
        assert again is not None
        assert "as an earlier start found" in again.describe()[0]
        assert (again.products, len(checks)) == (invariance.products, 2)
        for other, changes in (("MM", {}), ("M", {"max_requests": 3}), ("M", {"num_speculative_tokens": 1})):
            model = model_of(other)
            decide(model, on("cuda", model), replace(CONFIG, **changes))
        assert len(checks) == 8
        for number, text in enumerate(("[", "5"), 5):
            for stamp in tmp_path.rglob("*.json"):
                stamp.write_text(text)
            model = model_of("M")
            decide(model, on("cuda", model), CONFIG)
            assert len(checks) == 2 * number

    @pytest.mark.parametrize(
        ("product", "logits", "graphs", "reason"),
        [
            (None, None, 16, None),
            ("a product differs", None, 16, "a product differs"),
            (None, "in a decode", 16, "the model's logits have other bits in a decode"),
            (None, None, None, "num_cuda_graphs is None"),
        ],
    )
    def test_how_few_rows_a_decode_may_have(self, monkeypatch, product, logits, graphs, reason):
        """That an earlier start found it, too."""

        def forward_difference(invariance: BatchInvariance, model: Any, rows: int) -> str | None:
            return None if rows == MIN_CUBLAS_ROWS else logits

        monkeypatch.setattr(products, "record_products", lambda *_: ["aten.mm of something"])
        monkeypatch.setattr(products, "product_difference", lambda *_: None)
        monkeypatch.setattr(products, "why_not_in_few_rows", lambda _: product)
        monkeypatch.setattr(BatchInvariance, "_forward_difference", forward_difference)
        rows = f"32 rows, at least, because {reason}" if reason else "8 rows, at least"
        model = model_of("M")
        for checked_before in (False, True):
            invariance = decide(model, on("cuda", model), replace(CONFIG, num_cuda_graphs=graphs))[1]
            assert invariance is not None
            assert invariance.was_checked_before == checked_before
            assert invariance.products == ("aten.mm of something",)
            assert invariance.min_decode_tokens == (32 if reason else 8)
            assert invariance.describe()[1] == f"decodes are padded to {rows}"
        other = 16 if graphs is None else None
        invariance = decide(model, on("cuda", model), replace(CONFIG, num_cuda_graphs=other))[1]
        assert invariance is not None
        assert not invariance.was_checked_before

    def test_a_model_whose_class_is_in_no_file_is_checked_at_each_start(self, checks, monkeypatch):
        def getfile(_: object) -> str:
            raise OSError("source code not available")

        monkeypatch.setattr(inspect, "getfile", getfile)
        for _ in range(2):
            model = model_of("M")
            assert decide(model, on("cuda", model), CONFIG)[0].batch_invariant
        assert len(checks) == 4

    def test_memory_that_holds_no_inputs_rules_it_out(self, checks):
        model = model_of("M")
        config = replace(CONFIG, num_kv_blocks=None, num_mamba_slots=None, total_gb=1e-6)
        _, invariance, reason = decide(model, on("cuda", model), config)
        assert invariance is None
        assert reason.startswith("total_gb is 1e-06")
        assert not checks


def test_a_product_that_differs_is_refused_by_name(monkeypatch):
    model = model_of("M-")

    def difference(product: Product, most: int) -> str | None:
        return "among 512 rows" if product.arguments[-1].shape == (32, 100) else None

    monkeypatch.setattr(products, "product_difference", difference)
    invariance = BatchInvariance(model, model.state_spec(), CONFIG)
    message = (
        r"bits than among 256 rows by "
        r"aten.mm of \[rows, 32\] bfloat16 x \[32, 100\] bfloat16 among 512 rows; accepted"
    )
    with pytest.raises(BatchVarianceError, match=message):
        invariance._check(model)


def wide_config() -> ms.InferenceConfig:
    """Of an engine with batch invariance."""
    setting = {"batch_invariant"} & {field.name for field in fields(ms.InferenceConfig)}
    return ms.InferenceConfig(
        block_size_tokens=256, max_requests=32, max_tokens_per_step=4096, max_sequence_length=8192,
        num_kv_blocks=64,
        num_mamba_slots=8, num_cuda_graphs=16, **dict.fromkeys(setting, True),
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide_model() -> ms.models.HybridLM:
    config = ms.models.HybridConfig(
        vocab_size=131072, hidden_size=4096, pattern="M-*-", mamba_num_heads=128, mamba_head_dim=64,
        mamba_num_groups=8, mamba_state_dim=128, conv_kernel=4, ssd_chunk_size=128,
        num_attention_heads=32, num_kv_heads=8, head_dim=128, mlp_hidden_size=21504,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return ms.models.HybridLM(config, seed=0, device="cuda")


@pytest.mark.gpu
class TestOnAGPU:
    """Run with -s: prints what the check says of itself, and how long it takes."""

    def test_an_8b_shaped_model_keeps_bits(self, wide_model, needs_gpu_memory):
        needs_gpu_memory(16)
        model, spec = wide_model, wide_model.state_spec()
        for compiled in ("with compilation", "compiled"):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            invariance = BatchInvariance(model, spec, wide_config())
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            print(f"\nself-check, {compiled}: {seconds:.2f} s, {peak:.2f} GiB at most")
        print(*invariance.describe(), sep="\n")
        assert invariance.min_decode_tokens == 8 or "H200" not in torch.cuda.get_device_name()
        print(*invariance.products, sep="\n  ")
        check_switches()
        logits = (32 + 4096 + 255) * 131072 * 4 / 2**30  # of the largest step, in float32
        assert seconds < 5
        assert peak < 1 + logits

    def test_split_k_is_found_and_named(self, wide_model, needs_gpu_memory, monkeypatch):
        needs_gpu_memory(16)
        model, spec = wide_model, wide_model.state_spec()
        invariance = BatchInvariance(model, spec, wide_config())
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.preferred_blas_library("default")
        try:
            with pytest.raises(
                BatchVarianceError, match=r"aten.mm of \[rows, 21504\] bfloat16 x \[21504, 4096\]"
            ) as refused:
                invariance._check(model)
            print(f"\nrefused: {refused.value}")
            with pytest.raises(RuntimeError, match="accepted: 'cublaslt'") as named:
                check_switches()
            print(f"refused: {named.value}")
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
            torch.backends.cuda.preferred_blas_library("cublaslt")
