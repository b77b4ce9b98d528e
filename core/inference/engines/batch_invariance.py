"""What makes the bits of a request's answers depend on the request alone, and what checks it at the start."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...parallel_groups import on_device_of
from ...state_spec import HybridStateSpec
from ..contexts.row_ladder import FEW_ROWS, power_of_two, rung, rungs
from ..contexts.step_inputs import StepShape
from ..kernels import attention
from . import attention_check, forward_check, product_check, replaced_products
from .attention_check import AttentionSizes
from .blas_switches import BLAS_SWITCHES
from .dummy_steps import DummySteps
from .product_speed import is_faster
from .recorded_products import (
    ATTENTION,
    BatchVarianceError,
    Call,
    CallRecorder,
    Product,
    StepSizes,
    products,
)
from .replaced_products import WithReplacedProducts, is_replaceable
from .runner import Model

SETTING = "batch_invariant is True"
_SMALL, _LARGE = 64, 128  # tokens of the recorded prefills; their logits: 32 and 128


class CheckedProduct(NamedTuple):
    """A product that was compared. Holds no weights.

    Attributes:
        name: the operator, sizes and dtypes.
        weight_key: `recorded_products.weight_key` of its calls.
        num_rungs: how many numbers of rows were compared.
        replaced: whether `kernels.sequential_product` computes it instead.
        for_few_rows: whether `kernels.sequential_product` computes it for few rows, because the library takes
            longer.
        refused: where its bits differ, if it cannot be replaced.
    """

    name: str
    weight_key: tuple[Any, ...]
    num_rungs: int
    replaced: bool = False
    for_few_rows: bool = False
    refused: str = ""


class BatchInvariance:
    """Holds torch's switches for one engine, and has checked the engine's model when it is built.

    The promise: tokens and the bits of log-probs of a request depend on its own tokens, sampling parameters
    and seed alone, for one model, one kind of GPU, one set of library versions and one tensor-parallel size.

    Attributes:
        products: what was compared.
        attentions: likewise.
    """

    def __init__(
        self,
        model: Model,
        spec: HybridStateSpec,
        config: InferenceConfig,
        max_logits: int | None = None,
        *,
        replaces_products: bool = True,
    ) -> None:
        """Refuse, set torch's switches, and check the model. Where the model is split, this is a collective.

        Takes seconds. Needs memory for pools of two short requests and for the largest result of a product,
        float32 logits of the largest step perhaps, and gives it back to the device.

        Args:
            model: what the engine serves.
            spec: what the model said of itself.
            config: of the engine.
            max_logits: the most logit rows of a step; None: as many as a step has tokens, which steps that
                score have.
            replaces_products: whether a product whose bits depend on the number of rows is computed by
                `kernels.sequential_product` instead; otherwise it is refused.

        Raises:
            ValueError: a setting, or an operation of the model, cannot keep bits. The message names it.
            RuntimeError: another engine holds torch's switches, and somebody has changed one.
        """
        check_settings(spec, config)
        self._spec = spec
        self.products: tuple[CheckedProduct, ...] = ()
        self.attentions: tuple[AttentionSizes, ...] = ()
        self._replaces = replaces_products
        self._replays = config.replays
        width = power_of_two(1 + config.num_speculative_tokens)
        self._most_tokens = rung(config.max_requests * width + config.max_tokens)
        self._most_logits = rung(max_logits) if max_logits else self._most_tokens
        self._release = BLAS_SWITCHES.hold(self)
        try:
            if spec.device.type == "cuda":
                _fix_orders_of_addition(spec)
                with on_device_of(spec.device):
                    self._check(model, config)
                    torch.cuda.empty_cache()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let torch's switches go; calling twice is fine. A collected object is closed."""
        self._release()

    def check_switches(self) -> None:
        """Raise RuntimeError where somebody has changed a switch; for every step, takes microseconds."""
        BLAS_SWITCHES.check()

    def served(self, model: Model) -> Model:
        """The model with its replaced products; `model` itself where no product is replaced."""
        replaced = {checked.weight_key for checked in self.products if checked.replaced}
        for_few_rows = {checked.weight_key for checked in self.products if checked.for_few_rows}
        if not (replaced or for_few_rows):
            return model
        return WithReplacedProducts(model, replaced, for_few_rows)

    def describe(self) -> tuple[str, ...]:
        """What was chosen and checked, and what is not promised; a line each."""
        spec = self._spec
        if spec.device.type != "cuda":
            return ("batch invariance: not checked, in Triton's interpreter on a CPU",)
        compared = sum(checked.num_rungs for checked in self.products)
        replaced = [checked.name for checked in self.products if checked.replaced]
        lines = [
            "batch invariance: rows of steps are padded to 32, 64, 128, 256 and multiples of 256",
            f"products: cuBLASLt without split-K; {len(self.products)} shapes, {compared} numbers of rows "
            f"compared, {len(replaced) or 'no'} shapes differ",
        ]
        lines += [f"product replaced by one that adds over K in order: {name}" for name in replaced]
        lines += [
            f"product of at most {FEW_ROWS} rows by one that is faster, with equal bits: {checked.name}"
            for checked in self.products
            if checked.for_few_rows
        ]
        if spec.num_attention_layers:
            cuts = {
                attention.fixed_splits(spec.device, sizes.dtype, sizes.head_dim, sizes.block_size)
                for sizes in self.attentions
            }
            count = len(self.attentions)
            lines.append(f"attention: {', '.join(sorted(cuts))}; {count} shapes compared, 0 differ")
        decodes = "decodes over the end of a chunk" if self._replays else "not decodes, which do not replay"
        lines.append(f"whole model: prefills in parts, beside others, and {decodes}: 0 logits differ")
        size = spec.groups.tensor_size
        ranks = f", {size} tensor ranks, whose sums are added in rank order" if size > 1 else ""
        lines.append(
            f"the promise holds for {torch.cuda.get_device_name(spec.device)}, torch {torch.__version__}"
            f"{ranks}; other GPUs, versions and tensor-parallel sizes may give other bits"
        )
        return tuple(lines)

    # ---- the check

    def _check(self, model: Model, config: InferenceConfig) -> None:
        """Raise a BatchVarianceError on all ranks where the model of any rank is refused."""
        self._raise_of_any_rank(lambda: self._check_parts(model, config))
        self._raise_of_any_rank(lambda: self._check_forwards(model, config))
        self.check_switches()

    def _raise_of_any_rank(self, check: Callable[[], None]) -> None:
        refusal = ""
        try:
            check()
        except BatchVarianceError as error:
            refusal = str(error)
        groups = self._spec.groups
        refusals = groups.gather(refusal, self._spec.device) if groups.is_split else [refusal]
        if any(refusals):
            raise BatchVarianceError(next(filter(None, refusals)))

    def _check_parts(self, model: Model, config: InferenceConfig) -> None:
        found, attentions = record(model, self._spec, config)
        self.attentions = tuple(attentions)
        self.products = tuple(map(self._checked, found))
        refused = [f"{checked.name} {checked.refused}" for checked in self.products if checked.refused]
        if refused:
            raise BatchVarianceError(
                f"{SETTING}, and a row gets other bits than among {product_check.BASE_ROWS} rows by "
                f"{'; '.join(refused)}; accepted: products whose rows do not depend on the number of rows"
            )
        for sizes in attentions:
            case = attention_check.first_difference(sizes, self._spec.device)
            if case:
                raise BatchVarianceError(
                    f"{SETTING}, and {sizes} gives {case} other bits than in one prefill; accepted: a "
                    f"GPU and a version of {attention.PACKAGE} that keep bits with one split"
                )

    def _check_forwards(self, model: Model, config: InferenceConfig) -> None:
        """Where the model is split, this is a collective; all ranks see the same logits."""
        chunk, most = self._spec.chunk_tokens(config.block_size_tokens), self._most_tokens
        steps = DummySteps(self.served(model), self._spec, config, forward_check.longest(chunk), most)
        case = forward_check.first_difference(steps, chunk, most, decodes=self._replays)
        if case:
            raise BatchVarianceError(
                f"{SETTING}, and the model's logits have other bits {case} than in one prefill, though its "
                "products and attention keep them; accepted: a model whose scans, and all else, compute a "
                "row from its own sequence, in one order"
            )

    def _checked(self, product: Product) -> CheckedProduct:
        most = self._most_logits if product.of_logits else self._most_tokens
        count = len(rungs(most))
        case = product_check.first_difference(product, most)
        checked = CheckedProduct(product.name, product.weight_key, count)
        if not case:
            return checked._replace(for_few_rows=self._hurries(product, most))
        if self._replaces and is_replaceable(product):
            again = product_check.first_difference(product, most, replaced_products.sequential)
            if not again:
                return checked._replace(replaced=True)
            case = f"{case}, and by the sequential product {again}"
        return checked._replace(refused=case)

    def _hurries(self, product: Product, most: int) -> bool:
        """Whether another kernel computes few rows of a product faster, and with the same bits."""
        if not self._replaces or not is_replaceable(product):
            return False
        if not is_faster(product, replaced_products.sequential_for_few_rows, FEW_ROWS // 2):
            return False

        def mixed(arguments: Sequence[Any]) -> Tensor:
            rows = arguments[product.rows[0].argument]
            few = len(rows) <= FEW_ROWS
            result: Tensor = (replaced_products.sequential_for_few_rows if few else product.call.run)(
                arguments
            )
            return result

        return not product_check.first_difference(product, most, mixed)


def check_settings(spec: HybridStateSpec, config: InferenceConfig) -> None:
    """Raise a ValueError where a setting, the device or a dtype cannot keep bits. The message names it."""
    device, interpreted = spec.device, os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"{SETTING}, and the model is on {device}; accepted: a GPU, because products and scans of a CPU "
            "depend on the number of rows. Triton's interpreter, TRITON_INTERPRET=1, is accepted for tests"
        )
    sixteen = (torch.bfloat16, torch.float16)
    accepted = sixteen if device.type == "cuda" else (*sixteen, torch.float32)
    if spec.kv_dtype not in accepted:
        raise ValueError(
            f"{SETTING}, and the model is {_dtype(spec.kv_dtype)}; accepted: bfloat16 or float16, because "
            "products of wider numbers on a GPU depend on the number of rows"
        )
    for tensor in spec.states:
        if tensor.grid > 1 and tensor.dtype.itemsize < 4:
            raise ValueError(
                f"{SETTING}, and the state {tensor.name} is {_dtype(tensor.dtype)}; accepted: float32, "
                "because a narrower state is rounded wherever a step ends"
            )
    splits = os.environ.get(attention.SPLITS_VARIABLE)
    if splits not in (None, "1"):
        raise ValueError(f"{attention.SPLITS_VARIABLE} is {splits!r} and {SETTING}; accepted: 1, or not set")
    if spec.num_attention_layers and device.type == "cuda":
        rejected = attention.flash_rejection(device, spec.kv_dtype, spec.head_dim, config.block_size_tokens)
        if rejected:
            raise ValueError(f"{SETTING}, and {rejected}; accepted: a model that FlashAttention-3 takes")
    if spec.groups.tensor_size > 1 and not spec.groups.ordered_sums:
        raise ValueError(
            f"{SETTING}, and ordered_sums of the model's ParallelGroups is False with "
            f"{spec.groups.tensor_size} tensor ranks; accepted: True, because an all-reduce adds in an order "
            "that depends on the number of rows"
        )


def _fix_orders_of_addition(spec: HybridStateSpec) -> None:
    if any(tensor.name == "delta" and tensor.num_layers for tensor in spec.states):
        from ..kernels.delta import fix_orders_of_addition

        fix_orders_of_addition()


def record(
    model: Model, spec: HybridStateSpec, config: InferenceConfig
) -> tuple[list[Product], list[AttentionSizes]]:
    """The different products and attentions that a model makes in prefills and in decodes.

    Runs four short steps. Where the model is split, this is a collective.

    Raises:
        BatchVarianceError: an operation cannot keep bits, or attention runs with several splits.
    """
    steps = DummySteps(model, spec, config, longest=2 * _LARGE)
    prompts = [steps.request(steps.tokens(_SMALL // 2, seed)) for seed in range(2)]
    prefills = [
        _recorded(steps, prompt, _padding(tokens, logits))
        for prompt, (tokens, logits) in zip(prompts, ((_SMALL, 32), (_LARGE, 128)), strict=True)
    ]
    for prompt in prompts:
        prompt.append(steps.tokens(1), [None], 0.0)
    decodes = [
        _recorded(steps, prompt, _padding(tokens, logits))
        for prompt, (tokens, logits) in zip(prompts, ((32, 32), (64, 128)), strict=True)
    ]
    found = [
        *products(prefills[0], prefills[1], StepSizes(_SMALL, 32), StepSizes(_LARGE, 128)),
        *products(decodes[0], decodes[1], StepSizes(32, 32), StepSizes(64, 128)),
    ]
    calls = [call for part in (*prefills, *decodes) for call in part if call.name == ATTENTION]
    attentions = {_attention(call, config.block_size_tokens): None for call in calls}
    different: dict[object, Product] = {}
    for product in found:
        different.setdefault(product.key, product)
    return list(different.values()), list(attentions)


def _recorded(steps: DummySteps, request: Any, padding: Callable[[StepShape], StepShape]) -> list[Call]:
    recorder = CallRecorder()
    with recorder:
        steps.run([(request, steps.longest)], padding)
    return recorder.calls


def _padding(tokens: int, logits: int) -> Callable[[StepShape], StepShape]:
    def padded(shape: StepShape) -> StepShape:
        if shape.prefills:
            return shape._replace(prefill_tokens=tokens, logits=logits)
        return shape._replace(decodes=tokens, logits=logits)

    return padded


def _attention(call: Call, block_size: int) -> AttentionSizes:
    named = call.named
    query, keys = named["q"], named["k"]
    if named["num_splits"] != 1:
        raise BatchVarianceError(
            f"{SETTING}, and the model calls {call.name} with num_splits {named['num_splits']}; accepted: 1, "
            "as kernels.paged_attention has it for inputs.attention_rows"
        )
    return AttentionSizes(
        heads=query.shape[1],
        kv_heads=keys.shape[2],
        head_dim=query.shape[2],
        block_size=block_size,
        dtype=keys.dtype,
        scale=named["softmax_scale"],
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
