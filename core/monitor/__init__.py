"""What an operator watches: `Monitor` keeps figures of a running engine.

May import `engines`, `contexts`, `cache`; no server.
"""

from .monitor import Monitor

__all__ = ["Monitor"]
