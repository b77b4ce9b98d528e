"""Refusals, torch's switches, the products that a model makes, and what finds that rows change their bits."""

import gc
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
import torch.nn.functional as F
from mambaslots import parallel_groups
from mambaslots.inference.contexts.padding import padded_to_few, padded_to_ladder, rungs
from mambaslots.inference.engines import batch_invariance, forward_check, invariance_stamp, product_check
from mambaslots.inference.engines.batch_invariance import (
    SWITCHES,
    BatchInvariance,
    check_settings,
    decide,
    read_switch,
    write_switches,
)
from mambaslots.inference.engines.cuda_graphs import with_few_rows
from mambaslots.inference.engines.dummy_steps import DummySteps
from mambaslots.inference.engines.product_check import (
    BatchVarianceError,
    Product,
    ProductRecorder,
    record_products,
    with_rows,
)
from mambaslots.inference.kernels import few_rows
from oracle.hf_models import served_model
from oracle.serving import small_config
from torch import Tensor, nn

CONFIG = ms.InferenceConfig(
    block_size_tokens=16, max_requests=4, max_tokens_per_step=64, max_sequence_length=256, num_kv_blocks=64,
    num_mamba_slots=8,
)  # fmt: skip


def model_of(pattern: str, dtype: torch.dtype = torch.bfloat16) -> ms.models.HybridLM:
    return ms.models.HybridLM(small_config(16, dtype, pattern), seed=3)


def on(device: str, model: ms.models.HybridLM, **changes: Any) -> ms.HybridStateSpec:
    """The model's spec, as if the model were on `device`."""
    spec = replace(model.state_spec(), **changes)
    object.__setattr__(spec, "device", torch.device(device))
    return spec


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
        monkeypatch.setattr(
            batch_invariance.attention, "flash_rejection", lambda *_: "FlashAttention-3 needs x"
        )
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
        for module in (batch_invariance, parallel_groups):
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

        def parts(mode: BatchInvariance, *_: object) -> None:
            made.append("parts")
            mode.products = ("aten.mm of something",)

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
            config, mode, reason = decide(model, on("cuda", model), CONFIG)
            assert (config.batch_invariant, mode, reason) == (False, None, "a row differs")
        assert checks == ["parts", "parts"]
        with pytest.raises(BatchVarianceError, match="a row differs"):
            decide(model, on("cuda", model), replace(CONFIG, batch_invariant=True))

    def test_a_start_after_one_that_passed_does_not_check_again(self, checks, tmp_path):
        model = model_of("M")
        config, mode, reason = decide(model, on("cuda", model), CONFIG)
        assert (config.batch_invariant, reason, checks) == (True, "", ["parts", "forwards"])
        assert mode is not None
        assert "as an earlier start found" not in mode.describe()[0]
        again = decide(model_of("M"), on("cuda", model), CONFIG)[1]
        assert again is not None
        assert "as an earlier start found" in again.describe()[0]
        assert (again.products, len(checks)) == (mode.products, 2)
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

        def forward_difference(mode: BatchInvariance, model: Any, config: Any, padded: Any) -> str | None:
            return None if padded is padded_to_ladder else logits

        monkeypatch.setattr(product_check, "record_products", lambda *_: ["aten.mm of something"])
        monkeypatch.setattr(product_check, "product_difference", lambda *_: None)
        monkeypatch.setattr(product_check, "why_not_in_few_rows", lambda _: product)
        monkeypatch.setattr(BatchInvariance, "_forward_difference", forward_difference)
        rows = f"32 rows, at least, because {reason}" if reason else "8 rows, at least"
        model = model_of("M")
        for checked_before in (False, True):
            mode = decide(model, on("cuda", model), replace(CONFIG, num_cuda_graphs=graphs))[1]
            assert mode is not None
            assert mode.was_checked_before == checked_before
            assert mode.products == ("aten.mm of something",)
            assert mode.min_decode_tokens == (32 if reason else 8)
            assert mode.describe()[1] == f"decodes are padded to {rows}"
        other = 16 if graphs is None else None
        mode = decide(model, on("cuda", model), replace(CONFIG, num_cuda_graphs=other))[1]
        assert mode is not None
        assert not mode.was_checked_before

    def test_a_model_whose_class_is_in_no_file_is_checked_at_each_start(self, checks, monkeypatch):
        def getfile(_: object) -> str:
            raise OSError("source code not available")

        monkeypatch.setattr(invariance_stamp.inspect, "getfile", getfile)
        for _ in range(2):
            model = model_of("M")
            assert decide(model, on("cuda", model), CONFIG)[0].batch_invariant
        assert len(checks) == 4

    def test_memory_that_holds_no_inputs_rules_it_out(self, checks):
        model = model_of("M")
        config = replace(CONFIG, num_kv_blocks=None, num_mamba_slots=None, total_gb=1e-6)
        _, mode, reason = decide(model, on("cuda", model), config)
        assert mode is None
        assert reason.startswith("total_gb is 1e-06")
        assert not checks


class TestSwitches:
    @pytest.fixture(autouse=True)
    def as_before(self) -> Iterator[None]:
        before = {name: read_switch(name) for name in SWITCHES}
        yield
        write_switches(before)

    def test_a_change_is_named(self):
        model = model_of("M")
        invariance = BatchInvariance(model, model.state_spec(), CONFIG)
        assert {name: read_switch(name) for name in SWITCHES} == SWITCHES
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k is False
        invariance.check_switches()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        with pytest.raises(RuntimeError, match=r"matmul\.allow_bf16_reduced_precision_reduction is"):
            invariance.check_switches()

    def test_the_last_engine_that_needs_them_gives_them_back(self):
        before = {name: read_switch(name) for name in SWITCHES}
        model = model_of("M")
        alive = [BatchInvariance(model, model.state_spec(), CONFIG) for _ in range(2)]
        for _ in range(2):
            assert {name: read_switch(name) for name in SWITCHES} == SWITCHES != before
            alive.pop()
            gc.collect()
        assert {name: read_switch(name) for name in SWITCHES} == before
        alive.append(BatchInvariance(model, model.state_spec(), CONFIG))
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        alive.pop()
        gc.collect()
        changed = "matmul.allow_fp16_accumulation"
        assert {name: read_switch(name) for name in SWITCHES} == before | {changed: True}

    def test_a_refusal_leaves_them_as_they_were(self, monkeypatch):
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        before = {name: read_switch(name) for name in SWITCHES}
        model = model_of("M-")
        spec = on("cuda", model)

        def fails(*_: object) -> None:
            assert {name: read_switch(name) for name in SWITCHES} == SWITCHES
            raise BatchVarianceError("aten.mm of something")

        monkeypatch.setattr(BatchInvariance, "_check_once", fails)
        monkeypatch.setattr(batch_invariance, "on_device_of", lambda _: torch.cuda.device(-1))
        with pytest.raises(ValueError, match="of something"):
            BatchInvariance(model, spec, CONFIG)
        assert {name: read_switch(name) for name in SWITCHES} == before


def weights_of(found: list[Product]) -> set[tuple[int, ...]]:
    return {tuple(product.arguments[-1].shape) for product in found if product.name == "aten.mm"}


class TestRecorder:
    def test_all_products_of_a_hybrid_lm(self):
        model = model_of("M-*G-C")
        found = record_products(model, model.state_spec(), CONFIG)
        matrices = {
            tuple(reversed(weight.shape))
            for name, weight in model.named_parameters()
            if weight.dim() == 2 and "conv" not in name and name != "embedding"
        }
        matrices |= {  # those that are convolved by a product all the same
            tuple(reversed(weight.shape))
            for name, weight in model.named_parameters()
            if weight.dim() == 2 and "proj" in name
        }
        assert weights_of(found) == matrices
        assert all(row[1:] == (0, 1) for product in found for row in product.rows)

    @pytest.mark.parametrize("name", ["nemotron_h dense", "bamba"])
    def test_all_linear_modules_of_a_model_of_transformers(self, name):
        model = served_model(name, torch.bfloat16)
        found = record_products(model, model.state_spec(), CONFIG)
        made = weights_of(found) | {
            tuple(product.arguments[-1].shape) for product in found if product.name == "aten.addmm"
        }
        linear = {
            (module.in_features, module.out_features)
            for module in model.model.modules()
            if isinstance(module, nn.Linear)
        }
        inputs = {inner for inner, _ in made}
        assert inputs == {inner for inner, _ in linear}
        assert sum(outer for _, outer in made) >= max(outer for _, outer in linear)

    def products_of(self, step: Any) -> list[Product]:
        both = []
        for rows in (64, 128):
            with torch.inference_mode(), ProductRecorder() as recorder:
                step(torch.randn(rows, 16), torch.randn(rows, 16))
            both.append(recorder.products)
        return with_rows(*both, 64)

    def test_which_dimension_has_the_rows(self):
        weight, bias, many = torch.randn(8, 16), torch.randn(8), torch.randn(4, 16, 8)

        def step(x: Tensor, logits: Tensor) -> None:
            F.linear(x, weight, bias)
            F.linear(logits, weight)
            weight @ x.T
            torch.bmm(x.view(1, -1, 16).expand(4, -1, -1), many)
            torch.einsum("tk,tkn->tn", x, x.new_zeros(len(x), 16, 8))
            weight @ weight.T
            F.linear(x.view(-1, 8).repeat(1, 2), weight)

        found = self.products_of(step)
        assert [(one.name, one.rows) for one in found] == [
            ("aten.addmm", ((1, 0, 1),)),
            ("aten.mm", ((0, 0, 1),)),
            ("aten.mm", ((1, 1, 1),)),
            ("aten.bmm", ((0, 1, 1),)),
            ("aten.bmm", ((0, 0, 1), (1, 0, 1))),
            ("aten.mm", ((0, 0, 2),)),
        ]
        for one in found:
            assert product_check.product_difference(one, 64, exact(one)) is None

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda x, _: x.T @ x, "aten.mm of .*64.* adds over the rows of the step"),
            (lambda x, _: x @ x.T, "multiplies rows of the step with rows"),
            (lambda x, _: x.double() @ torch.zeros(16, 4).double(), "multiplies torch.float64"),
            (lambda x, _: torch.mv(x, x[0]), "aten.mv of .* is none of aten.mm"),
            (lambda x, _: F.conv1d(x.T[None], torch.zeros(4, 16, 3)), "convolution of .* is none of"),
            (lambda x, _: [x @ torch.zeros(16, 4) for _ in range(len(x) // 64)], "other products for other"),
            (lambda x, _: x[: len(x) // 3] @ torch.zeros(16, 4), "has 21 rows, and 42 in a larger step"),
        ],
    )  # fmt: skip
    def test_what_cannot_keep_bits_is_named(self, step, message):
        with pytest.raises(BatchVarianceError, match=message):
            self.products_of(step)

    def test_what_a_kernel_multiplies_inside_belongs_to_the_kernel(self):
        model = model_of("*")
        found = record_products(model, model.state_spec(), CONFIG)
        assert all(product.name == "aten.mm" for product in found)


def exact(product: Product) -> Any:
    """The product in float64, rounded: its rows depend on nothing."""

    def run(arguments: list[Any]) -> Tensor:
        wide = [leaf.double() if isinstance(leaf, Tensor) else leaf for leaf in arguments]
        return product.run(wide).float()

    return run


class TestProductCheck:
    def product(self, x: Tensor, *weights: Tensor, step: Any = torch.mm) -> Product:
        both = []
        for tokens in (64, 128):
            with torch.inference_mode(), ProductRecorder() as recorder:
                step(x[:1].repeat(tokens, 1), *weights)
            both.append(recorder.products)
        (found,) = with_rows(*both, 64)
        return found

    @pytest.mark.parametrize("error", [0, 1])
    def test_few_rows_are_compared_with_the_same_rows_among_more(self, monkeypatch, error):
        product, made = self.product(torch.randn(1, 32).half(), torch.randn(8, 32).half().T), []

        def exactly(rows: Tensor, weight: Tensor) -> Tensor:
            return (rows.double() @ weight.double()).half()

        def few(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
            made.append(len(rows))
            return exactly(rows, weight) + error

        def run(one: Product, arguments: list[Any]) -> Tensor:
            rows, weight = arguments
            return torch.mm(rows, weight) if len(rows) == 8 else exactly(rows, weight)

        monkeypatch.setattr(Product, "run", run)
        monkeypatch.setattr(few_rows, "product", few)
        differs = "aten.mm of [rows, 32] float16 x [32, 8] float16 differs among 8 rows"
        assert product_check.why_not_in_few_rows(product) == (differs if error else None)
        assert set(made) == {8}

    def test_few_rows_are_not_left_to_cublas(self, monkeypatch):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        monkeypatch.setattr(Product, "run", lambda _, both: both[0].double() @ both[1].double())
        assert product_check.why_not_in_few_rows(product) == f"cuBLAS makes {product}"

    def test_a_check_of_few_rows_that_raises_is_a_reason(self, monkeypatch):
        def run(one: Product, arguments: list[Any]) -> Tensor:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Product, "run", run)
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        assert str(product_check.why_not_in_few_rows(product)).endswith("raises RuntimeError: out of memory")

    def test_a_product_that_keeps_bits(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        assert product_check.product_difference(product, 1024, exact(product)) is None

    @pytest.mark.parametrize("rows", [32, 64, 128, 512, 768, 1024])
    def test_the_first_number_of_rows_that_differs(self, rows):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))

        def run(arguments: list[Any]) -> Tensor:
            result = exact(product)(arguments)
            if len(result) >= rows and len(result) != 256:
                result[5] = result[5].nextafter(torch.tensor(9.0))
            return result

        assert product_check.product_difference(product, 1024, run) == f"among {rows} rows"

    def test_a_row_that_differs_at_another_place(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))

        def run(arguments: list[Any]) -> Tensor:
            result = exact(product)(arguments)
            result[0] *= 2  # the first row of any product
            return result

        assert product_check.product_difference(product, 256, run) == "at another place among 32 rows"

    def test_every_rung_is_computed(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        seen = []

        def run(arguments: list[Any]) -> Tensor:
            seen.append(len(arguments[0]))
            return exact(product)(arguments)

        product_check.product_difference(product, 1000, run)
        assert set(seen) == set(rungs(1000)) == {32, 64, 128, 256, 512, 768, 1024}

    def test_operands_lie_in_memory_as_the_model_s_do(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8), step=lambda x, w: wide_rows(x) @ w)
        seen = []

        def run(arguments: list[Any]) -> Tensor:
            seen.append(arguments[0].stride())
            return exact(product)(arguments)

        product_check.product_difference(product, 64, run)
        assert set(seen) == {(48, 1)}

    @pytest.mark.parametrize("differs", [False, True])
    def test_grouped_products(self, differs):
        weight = torch.randn(4, 16, 8).bfloat16()
        per_row = 2

        def step(x: Tensor, weight: Tensor) -> Tensor:
            rows = x.bfloat16().repeat(per_row, 1)
            ends = torch.tensor([8, 8, 40, len(rows)], dtype=torch.int32)
            return F.grouped_mm(rows, weight, offs=ends)

        product = self.product(torch.randn(1, 16), weight, step=step)
        assert product.rows == ((0, 0, per_row),)

        def run(arguments: list[Any]) -> Tensor:
            rows, matrices, ends = (leaf for leaf in arguments if isinstance(leaf, Tensor))
            groups = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
            result = (rows.double()[:, None] @ matrices.double()[groups]).squeeze(1).bfloat16()
            if differs and len(rows) == 1024:
                result[7] = -result[7]
            return result

        expected = "among 512 rows" if differs else None
        assert product_check.product_difference(product, 512, run) == expected


class TestChoices:
    def test_equal_scores_are_compared(self):
        product = TestProductCheck().product(torch.randn(1, 8), step=lambda x: torch.topk(x, 2, dim=-1))
        assert product.name == "aten.topk"
        seen = []

        def run(arguments: list[Any]) -> Any:
            seen.append(arguments[0].sort(-1).values.diff(dim=-1).eq(0).any(-1))
            return product.run(arguments)

        assert product_check.product_difference(product, 512, run) is None
        assert torch.cat(seen).float().mean() > 0.9

        def unstable(arguments: list[Any]) -> Any:
            values, places = torch.topk(arguments[0], 2)
            return values, places.flip(-1) if len(places) == 512 else places

        assert product_check.product_difference(product, 512, unstable) == "among 512 rows"

    def test_a_choice_among_rows_is_refused(self):
        with pytest.raises(BatchVarianceError, match="adds over the rows of the step"):
            TestProductCheck().product(torch.randn(1, 8), step=lambda x: torch.topk(x, 2, dim=0))

    @pytest.mark.parametrize("name", ["nemotron_h MoE", "granitemoehybrid MoE", "qwen3_5_moe"])
    def test_the_experts_and_routers_of_models_are_found(self, name):
        model = served_model(name, torch.bfloat16)
        model.model.set_experts_implementation("grouped_mm")  # what "mambaslots" is on a GPU
        try:
            found = record_products(model, model.state_spec(), replace(CONFIG, block_size_tokens=64))
        finally:
            model.model.set_experts_implementation("mambaslots")
        names = [product.name for product in found]
        assert names.count("aten._grouped_mm") == 2
        assert "aten.topk" in names
        for product in found:
            assert "rows" in str(product)
            if product.name == "aten._grouped_mm":
                assert product.rows == ((0, 0, 2),)

    def test_the_rows_of_experts_keep_their_bits(self, monkeypatch):
        """Where a product's rows do: routing, sorting and the weighted sum do not mix rows."""
        from transformers.integrations import moe

        def by_row(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
            groups = torch.searchsorted(offs, torch.arange(len(rows)), right=True)
            return (rows[:, :, None] * weights[groups]).double().sum(1).to(rows.dtype)

        monkeypatch.setattr(moe, "_grouped_mm", by_row)
        model = served_model("qwen3_5_moe", torch.bfloat16)
        experts = next(
            module for module in model.model.modules() if type(module).__name__.endswith("Experts")
        )
        hidden = torch.randn(100, 32).bfloat16()
        scores = torch.randn(100, 4).round()  # equal scores
        weights, chosen = torch.topk(scores.softmax(-1), 2)

        def computed(rows: Tensor) -> Tensor:
            return moe.grouped_mm_experts_forward(
                experts, hidden[rows], chosen[rows], weights[rows].bfloat16()
            )

        whole = computed(torch.arange(100))
        for rows in (torch.arange(1), torch.arange(99, 100), torch.arange(32), torch.arange(100).flip(0)):
            assert torch.equal(computed(rows), whole[rows])


class Reading(nn.Module):
    """A model whose logits depend on the number of tokens of the step, in the last bit."""

    def __init__(self, model: ms.models.HybridLM, depends: Any) -> None:
        super().__init__()
        self._model, self._depends = model, depends
        self.state_spec = model.state_spec

    def forward(self, inputs: Any) -> Tensor:
        logits = self._model(inputs)
        return logits.nextafter(logits + 1) if self._depends(inputs.shape) else logits


class TestForwardCheck:
    @pytest.mark.parametrize(
        ("depends", "case"),
        [
            (lambda shape: False, None),
            (lambda shape: shape.tokens != 64, "in the first chunk of a prefill in parts"),
            (lambda shape: shape.prefills == 2, "in the last part of a prefill, beside another"),
            (lambda shape: shape.tokens == 256, "in the last part of a prefill, beside another"),
            (lambda shape: shape.prefill_tokens == 32, "in the first chunk of a prefill in parts"),
            (lambda shape: shape.prefills == 0, "in a decode at position 30, alone"),
            (lambda shape: shape.prefills and shape.decodes, "in a decode at position 34, beside a prefill"),
            (lambda shape: shape.decode_tokens > 1, "in a decode at position 35, with drafts"),
            (lambda shape: shape.tokens == 8, None),
        ],
    )
    def test_where_bits_differ(self, depends, case):
        model = Reading(model_of("M-*"), depends)
        config = replace(CONFIG, max_sequence_length=512, num_speculative_tokens=3)
        steps = DummySteps(model, model.state_spec(), config, forward_check.checked_length(16), 256)
        assert forward_check.forward_difference(steps, 16, 256) == case

    @pytest.mark.parametrize(
        ("depends", "case"),
        [
            (lambda shape: shape.tokens == 8, "in a decode at position 30, alone"),
            (lambda shape: shape.logits == 8, "in a decode at position 30, alone"),
            (
                lambda shape: shape.tokens == 8 and shape.decode_tokens == 4,
                "in a decode at position 35, with drafts",
            ),
        ],
    )
    def test_where_bits_of_few_rows_differ(self, depends, case):
        model = Reading(model_of("M-*"), depends)
        config = replace(CONFIG, max_sequence_length=512, num_speculative_tokens=3)
        steps = DummySteps(model, model.state_spec(), config, forward_check.checked_length(16), 256)
        assert forward_check.forward_difference(steps, 16, 256, padded_to_few) == case

    def test_products_of_few_rows_are_those_of_small_steps_alone(self, monkeypatch):
        sizes = list[int]()

        def product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
            sizes.append(len(rows))
            return torch.mm(rows, weight) * 1.25

        monkeypatch.setattr(few_rows, "is_taken", lambda rows, weight: True)
        monkeypatch.setattr(few_rows, "product", product)
        model, longest = model_of("M-*"), forward_check.checked_length(16)
        steps = DummySteps(with_few_rows(model), model.state_spec(), CONFIG, longest, 256)
        differs = forward_check.forward_difference(steps, 16, 256, padded_to_few)
        assert differs == "in a decode at position 30, alone"
        assert set(sizes) == {8}

    def test_it_releases_what_it_held(self):
        model = model_of("M*")
        steps = DummySteps(model, model.state_spec(), CONFIG, forward_check.checked_length(16), 256)
        for _ in range(3):
            assert forward_check.forward_difference(steps, 16, 256) is None
        assert steps._context.requests == []


def wide_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x, x], 1)[:, :16]


def test_a_product_that_differs_is_refused_by_name(monkeypatch):
    model = model_of("M-")

    def difference(product: Product, most: int) -> str | None:
        return "among 512 rows" if product.arguments[-1].shape == (32, 100) else None

    monkeypatch.setattr(product_check, "product_difference", difference)
    invariance = BatchInvariance(model, model.state_spec(), CONFIG)
    message = (
        r"bits than among 256 rows by "
        r"aten.mm of \[rows, 32\] bfloat16 x \[32, 100\] bfloat16 among 512 rows; accepted"
    )
    with pytest.raises(BatchVarianceError, match=message):
        invariance._check(model, CONFIG)


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
        invariance.check_switches()
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
                invariance._check(model, wide_config())
            print(f"\nrefused: {refused.value}")
            with pytest.raises(RuntimeError, match="accepted: 'cublaslt'") as named:
                invariance.check_switches()
            print(f"refused: {named.value}")
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
            torch.backends.cuda.preferred_blas_library("cublaslt")

    @pytest.mark.parametrize("experts", [8, 64, 128, 512])
    def test_choices_among_equal_scores_keep_bits(self, experts):
        for chosen in (1, 2, 6, 8):
            for is_sorted in (False, True):
                x = torch.randn(1, experts, device="cuda")
                product = TestProductCheck().product(
                    x, step=lambda x, k=chosen, s=is_sorted: torch.topk(x, k, sorted=s)
                )
                assert product_check.product_difference(product, 4096) is None

    @pytest.mark.parametrize("per_row", [2, 8])
    def test_grouped_products_keep_bits(self, per_row):
        weight = torch.randn(64, 1024, 2048, device="cuda").bfloat16()

        def step(x: Tensor, weight: Tensor) -> Tensor:
            rows = x.repeat(per_row, 1)
            ends = torch.full((64,), len(rows), dtype=torch.int32, device="cuda")
            return F.grouped_mm(rows, weight, offs=ends)

        x = torch.randn(1, 1024, device="cuda").bfloat16()
        write_switches(SWITCHES)
        product = TestProductCheck().product(x, weight, step=step)
        assert product_check.product_difference(product, 2048) is None
