"""Whether an engine is batch-invariant: the bits of an answer depend on its request alone."""

import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from ....config import InferenceConfig
from ....devices import on_device_of
from ....state_spec import HybridStateSpec
from ...contexts.dynamic_context import check_replays
from ...contexts.padding import MIN_CUBLAS_ROWS, invariant_bucket, invariant_buckets, power_of_two
from ...contexts.pool_sizes import PoolSizes, with_total_gb
from ...contexts.step_inputs import Model
from ...kernels import attention
from ...kernels.step_rows import FEW_ROWS
from ..cuda_graphs import Forward, with_few_rows
from . import forwards, products
from .dummy_steps import DummySteps
from .products import BatchVarianceError
from .stamp import read_stamp, stamp_of, write_stamp
from .switches import check_switches, hold_switches

SETTING = "batch_invariant is True"


class BatchInvariance:
    """Sets torch's switches as long as it lives, and checks an engine's model, when it is built."""

    def __init__(self, model: Model, spec: HybridStateSpec, config: InferenceConfig) -> None:
        """`config` has passed `check_settings`. A refusal leaves the switches as they were."""
        self._spec, self._config = spec, config
        self.products: tuple[str, ...] = ()  # operators, sizes and dtypes that were compared
        # Where it is None, a captured decode step may have 8 rows.
        self.why_not_few_rows: str | None = "nothing is checked"
        self.was_checked_before = False
        width = power_of_two(1 + config.num_speculative_tokens)
        self._most_tokens = invariant_bucket(config.max_requests * width + config.max_tokens_per_step)
        release = hold_switches(self)
        try:
            if spec.device.type == "cuda":
                if any(tensor.name == "delta" and tensor.num_layers for tensor in spec.states):
                    from ...kernels.delta import fix_orders_of_addition

                    fix_orders_of_addition()
                with on_device_of(spec.device):
                    self._check_once(model)
                    torch.cuda.empty_cache()
        except BaseException:
            release()
            raise

    @property
    def min_decode_tokens(self) -> int:
        """What captured decode steps are padded to, at least."""
        return FEW_ROWS if self.why_not_few_rows is None else MIN_CUBLAS_ROWS

    def describe(self) -> tuple[str, ...]:
        """What was chosen and checked, and what is not promised; a line each."""
        spec = self._spec
        if spec.device.type != "cuda":
            return ("batch invariance: not checked, in Triton's interpreter on a CPU",)
        num_buckets, size = len(invariant_buckets(self._most_tokens)), spec.groups.tensor_size
        ranks = f", {size} tensor ranks, whose sums are added in rank order" if size > 1 else ""
        return (
            f"batch invariance: {len(self.products)} shapes of products have the same bits in all of "
            f"{num_buckets} numbers of rows, and prefills in parts, prefills beside others and decodes the "
            "same logits" + (", as an earlier start found" if self.was_checked_before else ""),
            f"decodes are padded to {self.min_decode_tokens} rows, at least"
            + ("" if self.why_not_few_rows is None else f", because {self.why_not_few_rows}"),
            f"the promise holds for {torch.cuda.get_device_name(spec.device)}, torch {torch.__version__}"
            f"{ranks}; other GPUs, versions and tensor-parallel sizes may give other bits",
        )

    def _check_once(self, model: Model) -> None:
        """Check, unless an earlier start of the same model did on all ranks."""
        stamp = stamp_of(model, self._spec, self._config)
        content = read_stamp(stamp)
        self.was_checked_before = all(self._spec.groups.gather(content is not None, self._spec.device))
        if content is not None and self.was_checked_before:
            own_reason, self.products = content
            self.why_not_few_rows = first_reason(self._spec.groups.gather(own_reason, self._spec.device))
            return
        self._check(model)
        if stamp is not None:
            write_stamp(stamp, self.why_not_few_rows, self.products)

    def _check(self, model: Model) -> None:
        """Raise a BatchVarianceError on all ranks where the model of any rank is refused."""
        groups, device = self._spec.groups, self._spec.device
        for check in (self._check_parts, self._check_forwards):
            refusal = ""
            try:
                check(model)
            except BatchVarianceError as error:
                refusal = str(error)
            groups.raise_first(refusal, device, BatchVarianceError)
        self.why_not_few_rows = first_reason(groups.gather(self.why_not_few_rows, device))
        if self.why_not_few_rows is None:
            case = self._forward_difference(with_few_rows(model), FEW_ROWS)
            if case is not None:
                self.why_not_few_rows = f"the model's logits have other bits {case}"
        check_switches()

    def _check_parts(self, model: Model) -> None:
        record = products.record_products(model, self._spec, self._config)
        self.products = tuple(map(str, record))
        cases = [(product, products.product_difference(product, self._most_tokens)) for product in record]
        refused = [f"{product} {case}" for product, case in cases if case is not None]
        if refused:
            raise BatchVarianceError(
                f"{SETTING}, and a row gets other bits than among {products.BASE_ROWS} rows by "
                f"{'; '.join(refused)}; accepted: products whose rows do not depend on the number of rows"
            )
        self.why_not_few_rows = "num_cuda_graphs is None"
        if self._config.num_cuda_graphs is not None:
            self.why_not_few_rows = first_reason(map(products.why_not_in_few_rows, record))

    def _check_forwards(self, model: Model) -> None:
        """Where the model is split, this is a collective; all ranks see the same logits."""
        case = self._forward_difference(model, MIN_CUBLAS_ROWS)
        if case is not None:
            raise BatchVarianceError(
                f"{SETTING}, and the model's logits have other bits {case} than in one prefill, though its "
                "products and attention keep them; accepted: a model whose scans, and all else, compute a "
                "row from its own sequence, in one order"
            )

    def _forward_difference(self, model: Forward, min_decode_tokens: int) -> str | None:
        chunk, most = self._spec.chunk_tokens(self._config.block_size_tokens), self._most_tokens
        steps = DummySteps(model, self._spec, self._config, forwards.checked_length(chunk), most)
        return forwards.forward_difference(steps, chunk, most, min_decode_tokens)


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first reason that is not None; None where there is none. Takes no more reasons than it needs."""
    return next((reason for reason in reasons if reason is not None), None)


def decide(
    model: Model, spec: HybridStateSpec, config: InferenceConfig
) -> tuple[InferenceConfig, BatchInvariance | None, str]:
    """`config` with `batch_invariant` decided by all ranks together; the mode; why it is off, or an error."""
    refusal = ""
    invariant_config = with_total_gb(replace(config, batch_invariant=True), spec.device)
    try:
        check_replays(spec, invariant_config)
        check_settings(spec)
    except ValueError as error:
        refusal = str(error)
    try:
        spec.groups.raise_first(refusal, spec.device)
        PoolSizes.of(invariant_config, spec)  # its errors are those of all ranks
    except ValueError as error:
        return _off(config, error)
    try:
        return invariant_config, BatchInvariance(model, spec, invariant_config), ""
    except BatchVarianceError as error:
        return _off(config, error)


def _off(config: InferenceConfig, refusal: ValueError) -> tuple[InferenceConfig, None, str]:
    """The answer of `decide` where the mode is refused; raises `refusal` where the mode is asked for."""
    if config.batch_invariant:
        raise refusal
    reason = str(refusal).removeprefix(f"{SETTING}, and ").partition("; accepted")[0]
    return replace(config, batch_invariant=False), None, reason


def check_settings(spec: HybridStateSpec) -> None:
    """Raise a ValueError where the device, a dtype or the groups cannot keep bits. The message names it."""
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
    if spec.num_attention_layers and device.type == "cuda":
        rejected = attention.flash_rejection(device, spec.kv_dtype, spec.head_dim)
        if rejected:
            raise ValueError(f"{SETTING}, and {rejected}; accepted: a model that FlashAttention-3 takes")
    if spec.groups.tensor_size > 2 and not spec.groups.ordered_sums:
        raise ValueError(
            f"{SETTING}, and ordered_sums of the model's ParallelGroups is False with "
            f"{spec.groups.tensor_size} tensor ranks; accepted: True, because an all-reduce adds in an order "
            "that depends on the number of rows"
        )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
