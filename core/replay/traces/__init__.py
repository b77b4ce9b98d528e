"""Traces that a replay serves: generated ones, files, and a recorder of an engine's own traffic."""

from .generate import KINDS, generate

__all__ = ["KINDS", "generate"]
