"""The drop-in for megatron-core: `mambaslots.mcore.install()` before the inference context is built.

Importing this package imports no megatron-core; `install` does.
"""

from .host_stats import HostStats, stats
from .install import install, installed, uninstall
from .installation import Installation
from .overrides import REGISTRY, UnknownHostError
from .run_script import add_options, main, run_script

__all__ = [
    "install", "uninstall", "installed", "Installation", "stats", "HostStats", "UnknownHostError", "REGISTRY",
    "main", "run_script", "add_options",
]  # fmt: skip
