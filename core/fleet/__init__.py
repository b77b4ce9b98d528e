"""Several replicas of one model at one address, on Ray Serve. They need the extra `mambaslots[fleet]`.

A request goes from Ray's proxy to the ingress, which serves HTTP and chooses a replica; the replica's engine
answers in parts. Ray starts, watches and replaces both.

settings                             what a fleet is made of
server                               the process to start: Ray's cluster, the deployments, signals
ingress, cut_answers                 HTTP in front of all; what clients read where the ingress dies
fleet_engine, replica_answers        an engine over replicas, which continues elsewhere where one is lost
replica, warming, guard              one replica and its ranks; its first states; what ends a stopped process
known_replicas                       which replicas answer, which states they hold, which requests they have
request_router, calls                Ray's choice of a replica by that; calls of one replica and of all
figures                              the replicas' figures as one engine's

May import `serve`, `monitor`, `net`, `engines`, `contexts`, `cache`. Replicas make their engines, and the
ingress loads its text, by functions of the caller.
"""

from .settings import FleetSettings, check_installed

__all__ = ["FleetSettings", "check_installed"]
