"""Traces that a replay serves: generated ones, files, and a recorder of an engine's own traffic."""

from .generate import KINDS, generate
from .read_trace import read_trace
from .recorder import TraceRecorder

__all__ = ["KINDS", "TraceRecorder", "generate", "read_trace"]
