"""The drop-in for megatron-core: `mambaslots.mcore.install()` before the inference context is built.

Importing this package imports no megatron-core; `install` does.

May import `contexts`, `cache`, `kernels`; no engine of ours.
"""

from .host_record import HostStats
from .install import install, installed, stats, uninstall
from .overrides import UnknownHostError

__all__ = ["HostStats", "UnknownHostError", "install", "installed", "stats", "uninstall"]
