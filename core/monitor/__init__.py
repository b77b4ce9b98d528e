"""What an operator watches: `Monitor` keeps figures of a running engine."""

from .monitor import Monitor

__all__ = ["Monitor"]
