"""The drop-in for megatron-core: `mambaslots.mcore.install()` before the inference context is built."""

from .host_stats import HostStats, stats
from .install import install, installed, uninstall
from .overrides import REGISTRY, UnknownHostError

__all__ = ["install", "uninstall", "installed", "stats", "HostStats", "UnknownHostError", "REGISTRY"]
