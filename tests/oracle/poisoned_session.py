"""Whole suites with poison in all memory that may not be read: `pytest --poison`.

What holds poison within `poisoned()`:

free memory of pools, of engines without `free_memory="zero"`: state slots that hold nothing, free KV blocks,
    rows of KV blocks that no token is stored in, staging slots, inputs beside those that a decode replays,
    and free rows of host memory are poisoned before every forward.
scratch: `torch.empty` and its kin give NaN, the largest integer or True: outputs and scratch of kernels, the
    device memory through which states leave for host memory, and results on their way to the CPU. A captured
    graph fills its scratch anew at each replay.
step buffers: a step's fields are written over large numbers, which are no index of anything.
staging of hand-overs: the buffers for pieces hold NaN when a hand-over begins.
padding: every step is padded by odd amounts, where the engine does not pad it by itself to a graph bucket or
    to invariant buckets, and what the model embeds for padding tokens is NaN.

torch's own `fill_uninitialized_memory` comes with deterministic algorithms, others than those that serve.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from mambaslots.inference.contexts.step_builder import StepBuffer
from mambaslots.inference.contexts.step_inputs import StepInputs, StepShape
from mambaslots.inference.engines.cuda_graphs import GraphRunner
from mambaslots.inference.engines.dynamic_engine import DynamicInferenceEngine
from mambaslots.inference.engines.step_runner import StepRunner
from mambaslots.net.transfer.pieces import Staging
from oracle.memory_poison import poison
from torch import Tensor
from torch.utils._device import _device_constructors

Part = Literal["memory", "scratch", "buffers", "padding", "check"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What `poisoned` switches on; "check" raises where logits are NaN."""
POISON: tuple[Part, ...] = PARTS[:-1]
_ENGINES = "tests/unit/inference/engines/"
EXCEPTIONS: dict[str, tuple[tuple[Part, ...], str]] = {
    "tests/unit/test_config.py": (POISON, "looks at the defaults of settings"),
    _ENGINES + "test_memory_poison.py": (POISON, "compares engines with poison and without"),
    _ENGINES + "test_poisoned_session.py": (POISON, "as before"),
    _ENGINES + "test_invalid_logits.py": (("check",), "its models compute NaN by themselves"),
    _ENGINES + "test_async_scheduling.py::test_logits_that_are_no_numbers": (("check",), "as before"),
    _ENGINES + "test_score.py::test_invalid_logits": (("check",), "as before"),
    "tests/unit/faults/test_everything.py": (("check",), "as before"),
    "tests/unit/testing/test_wrong_models.py": (POISON, "what a wrong model forgets shows once more"),
    _ENGINES + "test_bits_grid.py": (("padding",), "looks at the fields of steps without padding"),
    _ENGINES + "test_score.py::test_one_prefill_without": (("padding",), "counts rows and tokens of steps"),
    "tests/unit/net/transfer/test_files.py": (("memory",), "compares pools; NaN equals nothing"),
    "tests/unit/net/transfer/test_imports.py": (("memory",), "as before"),
    "tests/unit/net/transfer/test_channel.py::test_a_thread_that": (("memory",), "as before"),
    _ENGINES + "test_cuda_graphs.py::TestBits": (("memory",), "as before"),
    _ENGINES + "test_scrub.py::test_on_a_gpu": (("memory",), "its free memory is zeros"),
    _ENGINES + "test_no_sync.py::test_one_copy": (("memory", "check"), "counts copies"),
}
"""Tests that run with less poison, by the beginnings of their ids: what is left out, and why."""

OUR_MODELS = ("mambaslots.models.hybrid_lm", "mambaslots.hf.served_model")
"""Modules of the models whose steps are padded; the latter imports transformers."""
NO_INDEX = 0x7F7F7F7F7F7F7F7F
"""What a step's fields are written over: as int32 two large numbers, too."""
PADDING = StepShape(
    decodes=2, prefills=3, prefill_tokens=7, max_query_tokens=5, block_columns=1, kv_writes=3, chunks=4,
    checkpoints=2, logits=3, decode_tokens=1,
)  # fmt: skip
"""What a step's sizes grow by; those of prefills where there are any, and `decode_tokens` with drafts."""


def left_out(test_id: str) -> tuple[Part, ...]:
    """The parts that a test runs without."""
    return next((parts for start, (parts, _) in EXCEPTIONS.items() if test_id.startswith(start)), ())


@contextmanager
def poisoned(without: Collection[Part] = ()) -> Iterator[None]:
    """Engines that are built within it have poison in all memory that may not be read.

    `without`: parts that are left out.
    """
    _device_constructors()  # torch notes the functions that a default device concerns: the real ones
    with ExitStack() as stack:
        for part, wraps in WRAPS.items():
            for owner, name, wrap in wraps if part not in without else ():
                stack.enter_context(_wrapped(owner, name, wrap))
        if "memory" not in without:
            wrap = partial(_poisoned_at_start, checks="check" not in without)
            stack.enter_context(_wrapped(DynamicInferenceEngine, "__init__", wrap))
        yield


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    with patch.object(owner, name, wrap(getattr(owner, name))):
        yield


# ---- free memory


def _poisoned_at_start(init: Callable[..., None], *, checks: bool) -> Callable[..., None]:
    @wraps(init)
    def poisoned_init(self: DynamicInferenceEngine, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        if self.config.free_memory != "zero":
            poison(self, checks=checks)

    return poisoned_init


# ---- scratch


def fill(tensor: Tensor) -> Tensor:
    """Fill new memory with what cannot be used unnoticed."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(torch.nan)
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return fill(make(*args, **kwargs))

    return empty


# ---- step buffers and staging


def _with_room(init: Callable[..., None]) -> Callable[..., None]:
    def with_room(self: StepBuffer, largest: StepShape, device: torch.device) -> None:
        init(self, _grown(largest._replace(decode_tokens=largest.decode_tokens + 1)), device)

    return with_room


def _grown(shape: StepShape) -> StepShape:
    """With padding of every kind, and so many writes of KV and so many logits as there are tokens."""
    wider = shape.decode_tokens > 1
    grown = StepShape(*(has + more for has, more in zip(shape, PADDING, strict=True)))
    if not shape.prefills:
        none = dict.fromkeys(("prefills", "prefill_tokens", "max_query_tokens", "chunks", "checkpoints"), 0)
        grown = grown._replace(**none)
    return grown._replace(decode_tokens=shape.decode_tokens + wider)


def _over_no_indices(arrays: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned_arrays(self: StepBuffer, shape: StepShape) -> Any:
        found = arrays(self, shape)
        self._hosts[self._turn].fill_(NO_INDEX)
        return found

    return poisoned_arrays


def _with_poisoned_buffers(reserve: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned_reserve(self: Staging, layout: Any) -> Any:
        checksum = reserve(self, layout)
        for buffer in self.buffers:
            buffer.fill_(0xFF)
        return checksum

    return poisoned_reserve


# ---- padding


def _knowing_its_model(init: Callable[..., None]) -> Callable[..., None]:
    """Steps of our models alone are padded: tests look at those of others."""

    @wraps(init)
    def knowing(self: DynamicInferenceEngine, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        is_ours = type(self.model).__module__ in OUR_MODELS
        self.core.step_runner.pads = is_ours  # type: ignore[attr-defined]

    return knowing


def _padding_more(padded: Callable[..., StepShape]) -> Callable[..., StepShape]:
    def more(self: StepRunner, shape: StepShape) -> StepShape:
        has_graph = self.graphs is not None and self.graphs.padded(shape) is not None
        if has_graph or self._context.config.batch_invariant or not getattr(self, "pads", False):
            return padded(self, shape)
        return _grown(shape)

    return more


def _on_poisoned_padding(run: Callable[..., Any]) -> Callable[..., Any]:
    def with_poison(self: StepRunner | GraphRunner, model: Any, *args: Any) -> Any:
        return run(self, PoisonedPadding(model), *args)

    return with_poison


class PoisonedPadding:
    """A model to which the tokens of padding are NaN."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: StepInputs) -> Tensor:
        ids = inputs.token_ids.as_subclass(PaddedIds)
        ids.is_padding = ~_is_real(inputs)
        return self._model(replace(inputs, token_ids=ids))


def _is_real(inputs: StepInputs) -> Tensor:
    """[tokens] whether each token of a step is no padding. Does not synchronise."""
    shape, device = inputs.shape, inputs.token_ids.device
    decodes = torch.arange(shape.decode_tokens, device=device) < inputs.query_lengths[: shape.decodes, None]
    prefills = torch.arange(shape.prefill_tokens, device=device) < inputs.chunks.query_start_loc[-1]
    return torch.cat([decodes.flatten(), prefills])


class PaddedIds(Tensor):
    """Token ids: what is looked up for those of padding is NaN, as far as it is a float."""

    is_padding: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        ids = next((one for one in args if isinstance(one, cls)), None)
        if ids is None or not isinstance(result, Tensor):
            return result
        result = result.as_subclass(Tensor)
        if result.shape[: ids.dim()] == ids.shape and result.is_floating_point() and result.dim() > ids.dim():
            return result.masked_fill(ids.is_padding.view(ids.shape)[..., None], torch.nan)
        if result.numel() == ids.numel() and result.data_ptr() == ids.data_ptr():
            result = result.as_subclass(cls)
            result.is_padding = ids.is_padding
        return result


WRAPS: dict[Part, list[tuple[Any, str, Callable[[Any], Any]]]] = {
    "scratch": [
        *((torch, name, _filling) for name in ("empty", "empty_like", "empty_strided")),
        *((Tensor, name, _filling) for name in ("new_empty", "new_empty_strided")),
    ],
    "buffers": [(StepBuffer, "arrays", _over_no_indices), (Staging, "reserve", _with_poisoned_buffers)],
    "padding": [
        (StepBuffer, "__init__", _with_room),
        (DynamicInferenceEngine, "__init__", _knowing_its_model),
        (StepRunner, "padded", _padding_more),
        (StepRunner, "run_model", _on_poisoned_padding),
        (GraphRunner, "after_step", _on_poisoned_padding),
    ],
}
"""Part -> whose function is wrapped by what."""
