"""Several replicas of one model at one address, on Ray Serve. They need the extra `mambaslots[fleet]`.

A request goes from Ray's proxy to the ingress, which serves HTTP and chooses a replica; the replica's engine
answers in parts. Ray starts, watches and replaces both. May import `serve`, `monitor`, `net`, `engines`,
`contexts`, `cache`.
"""

from .settings import FleetSettings, check_installed

__all__ = ["FleetSettings", "check_installed"]
