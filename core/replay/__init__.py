"""What a cache would have resumed: traces of requests, served by the engine's own books without a model."""

from .model_shapes import model_shape
from .rows import row_named
from .setting import ModelShape, ReplayResult, ReplaySetting, StepCost
from .trace import Trace, TraceRequest
from .traces import generate, read_trace

__all__ = [
    "ModelShape", "ReplayResult", "ReplaySetting", "StepCost", "Trace", "TraceRequest", "generate",
    "model_shape", "read_trace", "row_named",
]  # fmt: skip
