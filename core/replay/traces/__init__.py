"""Traces that a replay serves: generated ones, files, and a recorder of an engine's own traffic."""

from .generate import KINDS, generate
from .read_trace import read_trace

__all__ = ["KINDS", "generate", "read_trace"]
