"""The mode in which the bits of an answer depend on its request alone, and its check at an engine's start."""

import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...devices import on_device_of
from ...files import read_regular
from ...state_spec import HybridStateSpec
from ..contexts.dynamic_context import check_replays
from ..contexts.padding import FEWEST_ROWS, padded_to_ladder, power_of_two, rung, rungs
from ..contexts.pool_sizes import PoolSizes, sized
from ..contexts.request import DynamicInferenceRequest
from ..contexts.step_inputs import StepShape
from ..kernels import attention
from . import product_check
from .dummy_steps import DummySteps
from .model_protocol import Model
from .product_check import BatchVarianceError, Product, ProductRecorder, bits, with_rows

SETTING = "batch_invariant is True"
_PREFILL_ROWS, _DECODE_ROWS = 64, 32  # tokens of the recorded steps, and twice as many


class BatchInvariance:
    """Sets torch's switches for good, and checks an engine's model, when it is built."""

    def __init__(self, model: Model, spec: HybridStateSpec, config: InferenceConfig) -> None:
        """A refusal leaves the switches as they were."""
        check_settings(spec, config)
        self._spec = spec
        self.products: tuple[str, ...] = ()  # operators, sizes and dtypes that were compared
        self.was_checked_before = False
        width = power_of_two(1 + config.num_speculative_tokens)
        self._most_tokens = rung(config.max_requests * width + config.max_tokens_per_step)
        before = {name: read_switch(name) for name in SWITCHES}
        try:
            write_switches(SWITCHES)
            if spec.device.type == "cuda":
                if any(tensor.name == "delta" and tensor.num_layers for tensor in spec.states):
                    from ..kernels.delta import fix_orders_of_addition

                    fix_orders_of_addition()
                with on_device_of(spec.device):
                    self._check_once(model, config)
                    torch.cuda.empty_cache()
        except BaseException:
            write_switches(before)
            raise

    def check_switches(self) -> None:
        """Raise RuntimeError where a switch was changed; for every step, takes a few microseconds."""
        for name, needed in SWITCHES.items():
            if (value := read_switch(name)) != needed:
                raise RuntimeError(
                    f"torch.backends.cuda.{name} is {value}; accepted: {needed!r}, for an engine with "
                    "batch_invariant, because bits of products depend on the number of rows otherwise"
                )

    def describe(self) -> tuple[str, ...]:
        """What was chosen and checked, and what is not promised; a line each."""
        spec = self._spec
        if spec.device.type != "cuda":
            return ("batch invariance: not checked, in Triton's interpreter on a CPU",)
        size = spec.groups.tensor_size
        ranks = f", {size} tensor ranks, whose sums are added in rank order" if size > 1 else ""
        return (
            f"batch invariance: {len(self.products)} shapes of products have the same bits in all of "
            f"{len(rungs(self._most_tokens))} numbers of rows, and prefills in parts, prefills beside "
            "others and decodes the same logits"
            + (", as an earlier start found" if self.was_checked_before else ""),
            f"the promise holds for {torch.cuda.get_device_name(spec.device)}, torch {torch.__version__}"
            f"{ranks}; other GPUs, versions and tensor-parallel sizes may give other bits",
        )

    # ---- the check

    def _check_once(self, model: Model, config: InferenceConfig) -> None:
        """Check, unless an earlier start of the same model did on all ranks."""
        stamp = Stamp.of(model, self._spec, config)
        self.products = stamp.products()
        self.was_checked_before = all(self._spec.groups.gather(bool(self.products), self._spec.device))
        if not self.was_checked_before:
            self._check(model, config)
            stamp.write(self.products)

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
        self._spec.groups.raise_first(refusal, self._spec.device, BatchVarianceError)

    def _check_parts(self, model: Model, config: InferenceConfig) -> None:
        found = record(model, self._spec, config)
        self.products = tuple(map(str, found))
        cases = [(product, product_check.first_difference(product, self._most_tokens)) for product in found]
        refused = [f"{product} {case}" for product, case in cases if case]
        if refused:
            raise BatchVarianceError(
                f"{SETTING}, and a row gets other bits than among {product_check.BASE_ROWS} rows by "
                f"{'; '.join(refused)}; accepted: products whose rows do not depend on the number of rows"
            )

    def _check_forwards(self, model: Model, config: InferenceConfig) -> None:
        """Where the model is split, this is a collective; all ranks see the same logits."""
        chunk, most = self._spec.chunk_tokens(config.block_size_tokens), self._most_tokens
        steps = DummySteps(model, self._spec, config, checked_length(chunk), most)
        case = first_difference(steps, chunk, most)
        if case:
            raise BatchVarianceError(
                f"{SETTING}, and the model's logits have other bits {case} than in one prefill, though its "
                "products and attention keep them; accepted: a model whose scans, and all else, compute a "
                "row from its own sequence, in one order"
            )


class Stamp:
    """A file that says that a model has passed the check on this machine, with these versions and sizes."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None for a model that does not name its weights: each start checks it."""
        self._path = path

    @classmethod
    def of(cls, model: Model, spec: HybridStateSpec, config: InferenceConfig) -> "Stamp":
        """By all that the check depends on: shapes, but not the values of weights."""
        module = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
        if not isinstance(module, torch.nn.Module):
            return cls(None)
        tensors = (*module.named_parameters(), *module.named_buffers())
        try:
            files = {inspect.getfile(kind) for kind in {type(model), *map(type, module.modules())}}
            sources = [*Path(__file__).parents[2].rglob("*.py"), *map(Path, sorted(files))]
            written = sorted((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sources)
            folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        except (OSError, TypeError, RuntimeError):  # a class of no file, or a user without a home
            return cls(None)
        depends = (
            torch.__version__, torch.version.cuda, torch.cuda.get_device_properties(spec.device), _packages(),
            sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)), written,
            [(one.name, getattr(spec, one.name)) for one in fields(spec) if one.name != "groups"],
            spec.groups.tensor_size, [(name, one.shape, one.stride(), one.dtype) for name, one in tensors],
            config.block_size_tokens, config.max_requests, config.max_tokens_per_step,
            config.num_speculative_tokens,
        )  # fmt: skip
        digest = hashlib.sha256(repr(depends).encode()).hexdigest()
        return cls(folder / "mambaslots" / "batch_invariance" / f"{digest}.json")

    def products(self) -> tuple[str, ...]:
        """The products that were compared; none without a file that can be read."""
        try:
            found = None if self._path is None else json.loads(read_regular(self._path))
        except (OSError, ValueError):
            return ()
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def write(self, products: tuple[str, ...]) -> None:
        """Note that the check has passed; without a directory to write to, the next start checks again."""
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(products))
            part.replace(self._path)


_VARIABLES = "TRITON", "CUBLAS", "NVIDIA", "TORCH", "PYTORCH", "LD_"


def _packages() -> list[tuple[str, str]]:
    """What computes, with versions: also the libraries that pip may renew without torch."""
    names = "nvidia", "triton", "fla", "flash", "tokenspeed", "transformers"
    found = ((one.name, one.version) for one in importlib.metadata.distributions())
    return sorted(pair for pair in found if (pair[0] or "").startswith(names))


def promised(
    model: Model, spec: HybridStateSpec, config: InferenceConfig
) -> tuple[InferenceConfig, BatchInvariance | None, str]:
    """`config` with `batch_invariant` decided where it is None, the mode, and why it is off.

    Where the model is split, this is a collective; ranks decide alike. Raises what the mode raises, where the
    setting is True.
    """
    refusal, wanted = "", sized(replace(config, batch_invariant=True), spec.device)
    try:
        check_replays(spec, wanted)
        check_settings(spec, wanted)
    except ValueError as error:
        refusal = str(error)
    refusal = next(filter(None, spec.groups.gather(refusal, spec.device)), "")
    if refusal and config.batch_invariant:
        raise ValueError(refusal)
    try:
        if not refusal and config.batch_invariant is None:
            PoolSizes.of(wanted, spec)  # its errors are those of all ranks
    except ValueError as error:
        refusal = str(error)
    try:
        if not refusal:
            return wanted, BatchInvariance(model, spec, wanted), ""
    except BatchVarianceError as error:
        if config.batch_invariant:
            raise
        refusal = str(error)
    reason = refusal.removeprefix(f"{SETTING}, and ").partition("; accepted")[0]
    return replace(config, batch_invariant=False), None, reason


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


def record(model: Model, spec: HybridStateSpec, config: InferenceConfig) -> list[Product]:
    """The different products that a model makes in prefills and in decodes."""
    steps = DummySteps(model, spec, config, longest=4 * _PREFILL_ROWS)
    requests = [steps.request(steps.tokens(_PREFILL_ROWS // 2, seed)) for seed in range(2)]
    found: dict[object, Product] = {}
    for num_rows in (_PREFILL_ROWS, _DECODE_ROWS):  # a prefill, then a decode
        small, large = (
            _recorded(steps, request, rows)
            for request, rows in zip(requests, (num_rows, 2 * num_rows), strict=True)
        )
        for product in with_rows(small, large, num_rows):
            found.setdefault(product.key, product)
        for request in requests:
            request.append(steps.tokens(1), [None], 0.0)
    return list(found.values())


def _recorded(steps: DummySteps, request: DynamicInferenceRequest, num_rows: int) -> list[Product]:
    """The products of a step that is padded to so many tokens and logits."""

    def padded(shape: StepShape) -> StepShape:
        if shape.prefills:
            return shape._replace(prefill_tokens=num_rows, logits=num_rows)
        return shape._replace(decodes=num_rows, logits=num_rows)

    recorder = ProductRecorder()
    with recorder:
        steps.run([(request, steps.longest)], padded)
    return recorder.products


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SWITCHES: dict[str, object] = {
    "preferred_blas_library": "cublaslt",
    "matmul.allow_bf16_reduced_precision_reduction": (False, False),
    "matmul.allow_fp16_reduced_precision_reduction": (False, False),
    "matmul.allow_fp16_accumulation": False,
}
"""Switches of torch.backends.cuda, and the values with which cuBLAS does not split K: the first entry of a
pair is the reduction's precision, the second is whether K may be split."""


def read_switch(name: str) -> object:
    """The value of a switch, as it is written."""
    if name == "preferred_blas_library":
        return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    matmul, name = torch.backends.cuda.matmul, name.removeprefix("matmul.")
    value = getattr(matmul, name)
    return (value, getattr(matmul, f"{name}_split_k")) if name.endswith("reduction") else value


def write_switches(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name == "preferred_blas_library":
            torch.backends.cuda.preferred_blas_library(value)
        else:
            setattr(torch.backends.cuda.matmul, name.removeprefix("matmul."), value)


TAIL = 19
"""Tokens after the last whole chunk."""
DECODES = 5
"""Decodes without drafts, of which the third is of the first token of a chunk."""


def checked_length(chunk_tokens: int) -> int:
    """The tokens of the checked sequence: two chunks, and a part of one."""
    return 2 * chunk_tokens + TAIL


def first_difference(steps: DummySteps, chunk_tokens: int, most_tokens: int) -> str:
    """Where logits have other bits than in one prefill of the whole sequence; empty where nowhere."""
    return next((text for text, differs in _cases(steps, chunk_tokens, most_tokens) if bool(differs)), "")


def _cases(steps: DummySteps, chunk: int, most_tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Parts of one sequence in steps of all kinds, and whether their logits differ."""
    tokens = steps.tokens(checked_length(chunk))

    def as_large_as_can_be(shape: StepShape) -> StepShape:
        return padded_to_ladder(shape._replace(prefill_tokens=max(shape.prefill_tokens, most_tokens)))

    def among_more(shape: StepShape) -> StepShape:
        """Decodes padded to the second rung: kernels may share their work otherwise there."""
        return padded_to_ladder(shape if shape.prefills else shape._replace(decodes=FEWEST_ROWS + 1))

    def differs(logits: Tensor, start: int) -> Tensor:
        """Whether logits of the tokens from `start` on have other bits than in the whole prefill."""
        return bits(logits).ne(bits(whole[start : start + len(logits)])).any()

    request = steps.request(tokens)
    whole = steps.run([(request, len(tokens))], padded_to_ladder)[0]
    steps.release(request)

    request = steps.request(tokens)
    logits = steps.run([(request, chunk)], padded_to_ladder)[0]
    yield "in the first chunk of a prefill in parts", differs(logits, 0)
    other = steps.request(steps.tokens(chunk + 1, seed=1))
    work = [(request, len(tokens)), (other, len(tokens))]
    logits, _ = steps.run(work, as_large_as_can_be)
    yield "in the last part of a prefill, beside another", differs(logits, chunk)
    steps.release(request)
    steps.release(other)

    start = max(1, 2 * chunk - 2)
    request = steps.request(tokens[:start])
    yield "in a shorter prefill", differs(steps.run([(request, start)], padded_to_ladder)[0], 0)
    other = steps.request(steps.tokens(TAIL, seed=1))
    for position in range(start, start + DECODES):
        request.append(tokens[position : position + 1], [None], 0.0)
        work = [(request, 1)]
        if position == start + DECODES - 1:
            work.append((other, TAIL))
        logits = steps.run(work, among_more if position % 2 else padded_to_ladder)[0]
        where = "alone" if len(work) == 1 else "beside a prefill"
        yield f"in a decode at position {position}, {where}", differs(logits, position)
    position = start + DECODES
    drafts = tokens[position + 1 : position + 1 + steps.num_drafts]
    if drafts:
        request.append(tokens[position : position + 1], [None], 0.0)
        logits = steps.run([(request, 1)], padded_to_ladder, drafts)[0]
        yield f"in a decode at position {position}, with drafts", differs(logits, position)
    steps.release(request)
    steps.release(other)
