"""The products that a model makes, and what finds that rows change their bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mambaslots.inference.contexts.padding import invariant_buckets
from mambaslots.inference.engines.invariance.products import (
    BatchVarianceError,
    Product,
    ProductRecorder,
    product_difference,
    record_products,
    why_not_in_few_rows,
    with_rows,
)
from mambaslots.inference.engines.invariance.switches import SWITCHES, write_switches
from mambaslots.inference.kernels import few_rows
from oracle.checked_model import CONFIG, model_of
from oracle.hf_models import served_model
from torch import Tensor, nn


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
            assert product_difference(one, 64, exact(one)) is None

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


def wide_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x, x], 1)[:, :16]


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
        assert why_not_in_few_rows(product) == (differs if error else None)
        assert set(made) == {8}

    def test_few_rows_are_not_left_to_cublas(self, monkeypatch):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        monkeypatch.setattr(Product, "run", lambda _, both: both[0].double() @ both[1].double())
        assert why_not_in_few_rows(product) == f"cuBLAS makes {product}"

    def test_a_check_of_few_rows_that_raises_is_a_reason(self, monkeypatch):
        def run(one: Product, arguments: list[Any]) -> Tensor:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Product, "run", run)
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        assert str(why_not_in_few_rows(product)).endswith("raises RuntimeError: out of memory")

    def test_a_product_that_keeps_bits(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        assert product_difference(product, 1024, exact(product)) is None

    @pytest.mark.parametrize("rows", [32, 64, 128, 512, 768, 1024])
    def test_the_first_number_of_rows_that_differs(self, rows):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))

        def run(arguments: list[Any]) -> Tensor:
            result = exact(product)(arguments)
            if len(result) >= rows and len(result) != 256:
                result[5] = result[5].nextafter(torch.tensor(9.0))
            return result

        assert product_difference(product, 1024, run) == f"among {rows} rows"

    def test_a_row_that_differs_at_another_place(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))

        def run(arguments: list[Any]) -> Tensor:
            result = exact(product)(arguments)
            result[0] *= 2  # the first row of any product
            return result

        assert product_difference(product, 256, run) == "at another place among 32 rows"

    def test_every_bucket_is_computed(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8))
        seen = []

        def run(arguments: list[Any]) -> Tensor:
            seen.append(len(arguments[0]))
            return exact(product)(arguments)

        product_difference(product, 1000, run)
        assert set(seen) == set(invariant_buckets(1000)) == {32, 64, 128, 256, 512, 768, 1024}

    def test_operands_lie_in_memory_as_the_model_s_do(self):
        product = self.product(torch.randn(1, 16), torch.randn(16, 8), step=lambda x, w: wide_rows(x) @ w)
        seen = []

        def run(arguments: list[Any]) -> Tensor:
            seen.append(arguments[0].stride())
            return exact(product)(arguments)

        product_difference(product, 64, run)
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
        assert product_difference(product, 512, run) == expected


class TestChoices:
    def test_equal_scores_are_compared(self):
        product = TestProductCheck().product(torch.randn(1, 8), step=lambda x: torch.topk(x, 2, dim=-1))
        assert product.name == "aten.topk"
        seen = []

        def run(arguments: list[Any]) -> Any:
            seen.append(arguments[0].sort(-1).values.diff(dim=-1).eq(0).any(-1))
            return product.run(arguments)

        assert product_difference(product, 512, run) is None
        assert torch.cat(seen).float().mean() > 0.9

        def unstable(arguments: list[Any]) -> Any:
            values, places = torch.topk(arguments[0], 2)
            return values, places.flip(-1) if len(places) == 512 else places

        assert product_difference(product, 512, unstable) == "among 512 rows"

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


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("experts", [8, 64, 128, 512])
    def test_choices_among_equal_scores_keep_bits(self, experts):
        for chosen in (1, 2, 6, 8):
            for is_sorted in (False, True):
                x = torch.randn(1, experts, device="cuda")
                product = TestProductCheck().product(
                    x, step=lambda x, k=chosen, s=is_sorted: torch.topk(x, k, sorted=s)
                )
                assert product_difference(product, 4096) is None

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
        assert product_difference(product, 2048) is None
