"""The mode in which the bits of an answer depend on its request alone, and its check when an engine starts.

`tools/check_bits.py` compares at length: attention in many batches, and the speed of products.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...parallel_groups import on_device_of
from ...state_spec import HybridStateSpec
from ..contexts.request import DynamicInferenceRequest
from ..contexts.step_inputs import FEWEST_ROWS, StepShape, padded_to_ladder, power_of_two, rung, rungs
from ..kernels import attention
from . import product_check
from .dummy_steps import DummySteps
from .product_check import WithReplacedProducts, bits, is_replaceable
from .recorded_products import (
    ATTENTION,
    BatchVarianceError,
    Call,
    CallRecorder,
    Product,
    StepSizes,
    products,
)
from .runner import Model

SETTING = "batch_invariant is True"
_SMALL, _LARGE = 64, 128  # tokens of the recorded prefills; their logits: 32 and 128


class CheckedProduct(NamedTuple):
    """A product that was compared in `num_rungs` numbers of rows. Holds no weights.

    Attributes:
        name: the operator, sizes and dtypes.
        weight_key: `recorded_products.weight_key` of its calls.
        replaced: whether `kernels.sequential_product` computes it instead.
        refused: where its bits differ, if it cannot be replaced.
    """

    name: str
    weight_key: tuple[Any, ...]
    num_rungs: int
    replaced: bool = False
    refused: str = ""


class AttentionSizes(NamedTuple):
    """An attention of a model, as `kernels.attention.fixed_splits` takes it."""

    dtype: torch.dtype
    head_dim: int
    block_size: int


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
    ) -> None:
        """Refuse, set torch's switches, and check the model."""
        check_settings(spec, config)
        self._spec = spec
        self.products: tuple[CheckedProduct, ...] = ()
        self.attentions: tuple[AttentionSizes, ...] = ()
        self._served: WithReplacedProducts | None = None  # the model that `served` was asked for last
        self._replays = config.replays
        width = power_of_two(1 + config.num_speculative_tokens)
        self._most_tokens = rung(config.max_requests * width + config.max_tokens)
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
        """Release torch's switches; calling twice is fine. A collected object is closed."""
        self._release()

    def check_switches(self) -> None:
        """Raise RuntimeError where a switch was changed; for every step, takes microseconds."""
        BLAS_SWITCHES.check()

    def served(self, model: Model) -> Model:
        """The model with its replaced products; `model` itself where no product is replaced."""
        replaced = {checked.weight_key for checked in self.products if checked.replaced}
        if not replaced:
            return model
        if self._served is None or self._served.model is not model:
            self._served = WithReplacedProducts(model, replaced)
        return self._served

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
        if spec.num_attention_layers:
            cuts = {attention.fixed_splits(spec.device, *sizes) for sizes in self.attentions}
            lines.append(f"attention: {', '.join(sorted(cuts))}")
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

    def _check_forwards(self, model: Model, config: InferenceConfig) -> None:
        """Where the model is split, this is a collective; all ranks see the same logits."""
        chunk, most = self._spec.chunk_tokens(config.block_size_tokens), self._most_tokens
        steps = DummySteps(self.served(model), self._spec, config, checked_length(chunk), most)
        case = first_difference(steps, chunk, most, decodes=self._replays)
        if case:
            raise BatchVarianceError(
                f"{SETTING}, and the model's logits have other bits {case} than in one prefill, though its "
                "products and attention keep them; accepted: a model whose scans, and all else, compute a "
                "row from its own sequence, in one order"
            )

    def _checked(self, product: Product) -> CheckedProduct:
        most = self._most_tokens
        case = product_check.first_difference(product, most)
        checked = CheckedProduct(product.name, product.weight_key, len(rungs(most)))
        if not case:
            return checked
        if is_replaceable(product):
            again = product_check.first_difference(product, most, product_check.sequential)
            if not again:
                return checked._replace(replaced=True)
            case = f"{case}, and by the sequential product {again}"
        return checked._replace(refused=case)


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
    """The different products and attentions that a model makes in prefills and in decodes."""
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
    return AttentionSizes(keys.dtype, query.shape[2], block_size)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Switch:
    """One of torch's switches, and the value that products need to keep bits, also as users write it."""

    name: str
    read: Callable[[], object]
    write: Callable[[Any], object]
    needed: object
    shown: str


def _matmul_switch(name: str, *parts: str) -> Switch:
    """A switch of torch.backends.cuda.matmul, or one whose values are pairs, read from `parts`."""
    matmul = torch.backends.cuda.matmul
    needed = (False, False) if parts else False
    return Switch(
        f"torch.backends.cuda.matmul.{name}",
        lambda: tuple(getattr(matmul, part) for part in parts) if parts else getattr(matmul, name),
        lambda value: setattr(matmul, name, value),
        needed,
        str(needed),
    )


_BF16, _FP16 = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
SWITCHES = (
    Switch(
        "torch.backends.cuda.preferred_blas_library",
        torch.backends.cuda.preferred_blas_library,
        torch.backends.cuda.preferred_blas_library,
        torch._C._BlasBackend.Cublaslt,
        "'cublaslt'",
    ),
    _matmul_switch(_BF16, _BF16, f"{_BF16}_split_k"),
    _matmul_switch(_FP16, _FP16, f"{_FP16}_split_k"),
    _matmul_switch("allow_fp16_accumulation"),
)
"""With these, cuBLAS does not split K: the first entry of a pair is the reduction's precision, the second is
whether K may be split."""


class BlasSwitches:
    """Holds torch's switches of the process while an engine needs them; thread-safe.

    The last release restores the values from before, except for a switch that was changed meanwhile.
    """

    def __init__(self, switches: tuple[Switch, ...] = SWITCHES) -> None:
        self._switches = switches
        self._lock = RLock()  # a finalizer may run in the thread that holds it
        self._holders = 0
        self._before: tuple[object, ...] = ()

    def hold(self, owner: object) -> Callable[[], object]:
        """Set the switches until the result is called, or `owner` is collected; calling twice is fine."""
        with self._lock:
            self._holders += 1  # first: a finalizer that runs now puts nothing back
            try:
                if self._holders == 1:
                    self._before = tuple(switch.read() for switch in self._switches)
                    for switch in self._switches:
                        switch.write(switch.needed)
                self.check()
                release = weakref.finalize(owner, self._release)
            except BaseException:
                self._release()
                raise
            release.atexit = False
            return release

    def check(self) -> None:
        """Raise RuntimeError where a held switch has another value; takes a few microseconds."""
        for switch in self._switches:
            if switch.read() != switch.needed:
                raise RuntimeError(
                    f"{switch.name} is {switch.read()}; accepted: {switch.shown}, while an engine with "
                    "batch_invariant lives, because bits of products depend on the number of rows otherwise"
                )

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for switch, before in zip(self._switches, self._before, strict=False):
                if switch.read() == switch.needed:
                    switch.write(before)
            self._before = ()


BLAS_SWITCHES = BlasSwitches()
"""The process's one."""

TAIL = 19
"""Tokens after the last whole chunk."""
DECODES = 5
"""Decodes without drafts, of which the third is of the first token of a chunk."""


def checked_length(chunk_tokens: int) -> int:
    """The tokens of the checked sequence: two chunks, and a part of one."""
    return 2 * chunk_tokens + TAIL


def first_difference(steps: DummySteps, chunk_tokens: int, most_tokens: int, decodes: bool) -> str:
    """Where logits have other bits than in one prefill of the whole sequence; empty where nowhere."""
    check = _ForwardCheck(steps, chunk_tokens, most_tokens)
    cases = chain(check.prefills(), check.decodes() if decodes else ())
    return next((text for text, differs in cases if bool(differs)), "")


class _ForwardCheck:
    def __init__(self, steps: DummySteps, chunk_tokens: int, most_tokens: int) -> None:
        self._steps, self._chunk, self._most_tokens = steps, chunk_tokens, most_tokens
        self._tokens = steps.tokens(checked_length(chunk_tokens))
        request = steps.request(self._tokens)
        self._whole = self._run(request)
        steps.release(request)

    def prefills(self) -> Iterator[tuple[str, Tensor]]:
        """Each case, and whether it differs."""
        request = self._steps.request(self._tokens)
        yield "in the first chunk of a prefill in parts", self._differs(self._run(request, self._chunk), 0)
        other = self._steps.request(self._steps.tokens(self._chunk + 1, seed=1))
        work = [(request, len(self._tokens)), (other, len(self._tokens))]
        rest, _ = self._steps.run(work, self._as_large_as_can_be)
        yield "in the last part of a prefill, beside another", self._differs(rest, self._chunk)
        self._steps.release(request)
        self._steps.release(other)

    def decodes(self) -> Iterator[tuple[str, Tensor]]:
        """Each case, and whether it differs."""
        start = max(1, 2 * self._chunk - 2)
        request = self._steps.request(self._tokens[:start])
        yield "in a shorter prefill", self._differs(self._run(request), 0)
        other = self._steps.request(self._steps.tokens(TAIL, seed=1))
        for position in range(start, start + DECODES):
            request.append(self._tokens[position : position + 1], [None], 0.0)
            work = [(request, 1)]
            if position == start + DECODES - 1:
                work.append((other, TAIL))
            logits = self._steps.run(work, _among_more if position % 2 else padded_to_ladder)[0]
            where = "alone" if len(work) == 1 else "beside a prefill"
            yield f"in a decode at position {position}, {where}", self._differs(logits, position)
        position = start + DECODES
        drafts = self._tokens[position + 1 : position + 1 + self._steps.num_drafts]
        if drafts:
            request.append(self._tokens[position : position + 1], [None], 0.0)
            logits = self._steps.run([(request, 1)], padded_to_ladder, drafts)[0]
            yield f"in a decode at position {position}, with drafts", self._differs(logits, position)
        self._steps.release(request)
        self._steps.release(other)

    def _run(self, request: DynamicInferenceRequest, budget: int | None = None) -> Tensor:
        return self._steps.run([(request, budget or len(self._tokens))], padded_to_ladder)[0]

    def _differs(self, logits: Tensor, start: int) -> Tensor:
        """Whether logits of the tokens from `start` on have other bits than in the whole prefill."""
        expected = self._whole[start : start + len(logits)]
        return bits(logits).ne(bits(expected)).any()

    def _as_large_as_can_be(self, shape: StepShape) -> StepShape:
        return padded_to_ladder(shape._replace(prefill_tokens=max(shape.prefill_tokens, self._most_tokens)))


def _among_more(shape: StepShape) -> StepShape:
    """Decodes padded to the second rung: kernels may share their work otherwise there."""
    return padded_to_ladder(shape if shape.prefills else shape._replace(decodes=FEWEST_ROWS + 1))
