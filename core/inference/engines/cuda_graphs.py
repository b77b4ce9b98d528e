"""How a model's steps run: eagerly, or as CUDA graphs, one launch a step."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...state_spec import HybridStateSpec
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.padding import MIN_CUBLAS_ROWS, invariant_bucket, power_of_two
from ..contexts.step_inputs import Model, StepInputs, StepShape

SMALLEST_PREFILL_TOKENS = 16
MAX_PREFILL_TOKENS = 512  # prefill tokens of a captured step, padding included, at most
Forward = Callable[[StepInputs], Tensor]


@dataclass(frozen=True)
class GraphBuckets:
    """Graph buckets: the shapes that graphs are captured for.

    Rows are powers of two in decode steps, powers of four with prefills; prefill tokens are 2^k or 3 * 2^k,
    up to `max_prefill_tokens`. A size that follows from other sizes has its largest value. With batch
    invariance, all tokens together and the logits are invariant buckets, too, and decode steps have
    `min_decode_tokens`, 8 or 32, at least; it is 0 without.
    """

    max_requests: int
    block_columns: int
    max_prefill_tokens: int
    chunk_size: int
    block_size: int
    decode_tokens: int = 1
    min_decode_tokens: int = 0

    @classmethod
    def of(cls, context: DynamicInferenceContext, min_decode_tokens: int = 0) -> "GraphBuckets":
        """The shapes for the steps of a context."""
        config = context.config
        return cls(
            max_requests=config.max_requests, block_columns=context.admission.block_table.shape[1],
            max_prefill_tokens=min(MAX_PREFILL_TOKENS, config.max_tokens_per_step),
            chunk_size=context.spec.chunk_tokens(config.block_size_tokens),
            block_size=config.block_size_tokens, decode_tokens=1 + config.num_speculative_tokens,
            min_decode_tokens=min_decode_tokens,
        )  # fmt: skip

    @property
    def have_few_rows(self) -> bool:
        """Whether decode steps may have fewer rows than cuBLAS needs, and the bits of invariant buckets."""
        return 0 < self.min_decode_tokens < MIN_CUBLAS_ROWS

    def smallest(self, shape: StepShape) -> StepShape | None:
        """The smallest bucket that holds a step of `shape`; None where none does."""
        if self.min_decode_tokens and shape.prefills and not self.max_prefill_tokens:
            return None
        per_row, prefills, tokens = 1, 0, 0
        if shape.decode_tokens > 1:
            per_row = power_of_two(self.decode_tokens) if self.min_decode_tokens else self.decode_tokens
        if shape.prefills:
            prefills = _next_power(shape.prefills, 4, self.max_requests)
            decodes = _next_power(shape.decodes, 4, self.max_requests) if shape.decodes else 0
            tokens = self._prefill_tokens(shape.prefill_tokens, decodes * per_row)
        elif self.min_decode_tokens:
            decode_tokens = invariant_bucket(shape.decodes * per_row, self.min_decode_tokens)
            most = invariant_bucket(self.max_requests * per_row)
            decodes = _next_power(decode_tokens, 2, most) // per_row
        else:
            decodes = _next_power(shape.decodes, 2, self.max_requests)
        logits = decodes * per_row + prefills
        if self.min_decode_tokens and prefills:
            logits = invariant_bucket(logits)
        fitting = StepShape(
            decodes=decodes, prefills=prefills, prefill_tokens=tokens, max_query_tokens=tokens,
            block_columns=_next_power(shape.block_columns, 2, self.block_columns),
            kv_writes=decodes * per_row + tokens, chunks=tokens // self.chunk_size + 2 * prefills,
            checkpoints=tokens // max(self.block_size, self.chunk_size) + prefills,
            logits=logits, decode_tokens=per_row, input_block_columns=shape.input_block_columns,
        )  # fmt: skip
        return fitting if all(has >= needs for has, needs in zip(fitting, shape, strict=True)) else None

    def _prefill_tokens(self, num_prefill: int, num_decode: int) -> int:
        """Prefill tokens of a step that also has `num_decode` decode tokens, padding included."""
        if not self.min_decode_tokens:
            return min(_padded_size(num_prefill, SMALLEST_PREFILL_TOKENS), self.max_prefill_tokens)
        most = invariant_bucket(num_decode + self.max_prefill_tokens)
        size = _padded_size(num_decode + num_prefill, MIN_CUBLAS_ROWS)  # perhaps 3 * 2^k, which is no bucket
        return min(invariant_bucket(size), most) - num_decode


def with_few_rows(model: Forward) -> Forward:
    """The model; its steps of fewer than 32 tokens have products with the bits of invariant buckets."""

    def forward(inputs: StepInputs) -> Tensor:
        if inputs.shape.tokens >= MIN_CUBLAS_ROWS:
            return model(inputs)
        from ..kernels.few_rows import FewRowsProducts  # here, because it imports triton

        with FewRowsProducts():
            return model(inputs)

    return forward


class CapturedForward:
    """One forward as a graph. A launch reads and writes the addresses of the capture."""

    def __init__(self, model: Forward, inputs: StepInputs, pool: Any) -> None:
        """Capture the forward; a capture runs nothing. `pool`: another graph's memory, to share."""
        self._graph = torch.cuda.CUDAGraph()
        self._inputs = inputs  # keeps the tensors alive
        device = inputs.token_ids.device
        with (
            _no_collection(),
            torch.cuda.stream(torch.cuda.current_stream(device)),  # resets the stream if a capture fails
            torch.cuda.graph(self._graph, pool=pool, stream=_capture_stream(device)),
        ):
            self._logits = model(inputs)
        self.pool = self._graph.pool()  # the graph's memory

    def launch(self) -> Tensor:
        """Run on what the inputs' tensors hold now; the next launch overwrites the returned logits."""
        self._graph.replay()
        return self._logits


class GraphRunner:
    """Runs a model's steps, as a graph where the step's shape has one.

    The first step of a shape runs eagerly, on padded inputs, and so compiles and tunes all kernels at exactly
    this shape. Graphs hold the addresses of the pools and of the step buffer: a suspend clears all graphs.
    Padding writes no state, because every index of padding is -1.
    """

    def __init__(self, spec: HybridStateSpec, buckets: GraphBuckets, max_graphs: int) -> None:
        """`max_graphs`: most graphs of decodes, and of prefills."""
        self._spec = spec
        self._buckets = buckets
        self._max_graphs = max_graphs
        self._graphs: dict[StepShape, CapturedForward] = {}
        self._first: StepInputs | None = None
        self._kv_cache: Tensor | None = None  # of the steps so far
        self._failure = ""

    @classmethod
    def of(cls, context: DynamicInferenceContext, min_decode_tokens: int) -> "GraphRunner | None":
        """What the configuration asks for; None where the device or the dtypes do not allow it."""
        spec, config = context.spec, context.config
        dtypes = {spec.kv_dtype, *(tensor.dtype for tensor in spec.states)}
        if config.num_cuda_graphs is None or spec.device.type != "cuda" or torch.float64 in dtypes:
            return None
        return cls(spec, GraphBuckets.of(context, min_decode_tokens), config.num_cuda_graphs)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The shapes that have a graph, in the order of their capture."""
        return tuple(self._graphs)

    @property
    def captures_next(self) -> bool:
        """Whether `after_step` will capture what has run last, before another step may run."""
        return self._first is not None

    def describe(self) -> str:
        """How many graphs are captured, and how many may be."""
        if self._failure:
            return f"none; the model cannot be captured: {self._failure}"
        return f"{len(self._graphs)} captured; at most {self._max_graphs} of decodes, and of prefills"

    def padded(self, shape: StepShape) -> StepShape | None:
        """The shape to pad a step of `shape` to; None for a step that gets no graph."""
        fitting = self._buckets.smallest(shape)
        if fitting is None or fitting in self._graphs or self._has_room(fitting):
            return fitting
        if not self._buckets.have_few_rows:
            return None
        usual = replace(self._buckets, min_decode_tokens=MIN_CUBLAS_ROWS).smallest(shape)
        return usual if usual in self._graphs else None

    def _has_room(self, shape: StepShape) -> bool:
        return sum((key.prefills == 0) == (shape.prefills == 0) for key in self._graphs) < self._max_graphs

    def run(self, model: Model, inputs: StepInputs) -> Tensor:
        """The model's logits. Does not synchronise."""
        self._first = None
        if inputs.kv_cache is not self._kv_cache:  # the pools were allocated anew since
            self.clear_graphs()
            self._kv_cache = inputs.kv_cache
        graph = self._graphs.get(inputs.shape)
        if graph is not None:
            return graph.launch()
        logits = self._forward_of(model)(inputs)
        if self._buckets.smallest(inputs.shape) == inputs.shape and self._has_room(inputs.shape):
            self._first = inputs
        return logits

    def _forward_of(self, model: Model) -> Forward:
        return with_few_rows(model) if self._buckets.have_few_rows else model

    def after_step(self, model: Model) -> None:
        """Capture the shape that the last step ran for the first time, if any; synchronises."""
        inputs, self._first = self._first, None
        if inputs is None:
            return
        shared = next(iter(self._graphs.values())).pool if self._graphs else None
        failure: object = None
        try:
            self._graphs[inputs.shape] = CapturedForward(self._forward_of(model), inputs, shared)
        except Exception as error:
            failure = error
        if not self._spec.groups.least(int(failure is None), inputs.token_ids.device):
            self._max_graphs = 0
            self.clear_graphs()
            failure = failure or "another rank could not capture it"
            self._failure = str(failure)
            warnings.warn(f"the model cannot be captured, and runs without graphs: {failure}", stacklevel=2)

    def clear_graphs(self) -> None:
        """Remove all graphs, and free their memory; waits for a graph that may still run."""
        if self._graphs and self._spec.device.type == "cuda":
            torch.cuda.synchronize(self._spec.device)
        self._graphs.clear()
        self._first = self._kv_cache = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: a graph destroyed there would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The device's one capture stream: graphs share memory only if they are captured on the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _next_power(count: int, base: int, maximum: int) -> int:
    """The smallest power of `base` that is at least `count`, but at most `maximum`."""
    size = 1
    while size < count:
        size *= base
    return min(size, maximum)


def _padded_size(count: int, smallest: int) -> int:
    """The first of `smallest` * (1, 1.5, 2, 3, 4, 6, ..) that is at least `count`; `smallest` is 2^k."""
    size = max(smallest, power_of_two(count))
    return size * 3 // 4 if size > smallest and size * 3 // 4 >= count else size
