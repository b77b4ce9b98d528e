"""The routers by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .blind_routers import PowerOfTwoRouter, RandomRouter, RoundRobinRouter
from .prefix_router import PrefixRouter
from .router import Router
from .state_router import StateRouter

ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {
        "state": StateRouter,
        "prefix": PrefixRouter,
        "random": RandomRouter,
        "round-robin": RoundRobinRouter,
        "power-of-two": PowerOfTwoRouter,
    }
)
"""Name -> what makes a router from a seed."""
