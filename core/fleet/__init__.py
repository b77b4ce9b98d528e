"""Several replicas of one model at one address, on Ray Serve. They need the extra `mambaslots[fleet]`.

A request goes from Ray's proxy to an ingress, which serves HTTP and chooses a replica; the replica's engine
answers in parts. Ray starts, watches and replaces both.

fleet_server, fleet_settings         the process that deploys both and drains them
ingress, fleet_engine                HTTP over replicas; a lost replica's answers continue on another one
known_replicas, request_router       what an ingress knows of each replica; which one gets a request
replica_calls                        calls of replicas: a request to one, a question to any
replica_answers                      requests to replicas, and answers in parts
replica, replica_questions           an engine in its process; what ingresses ask it
warming                              a new replica receives states
guard, cut_answers                   kills a process that stands still; ends streams of a lost ingress
replica_reports                      metrics and the page's snapshot of all together
"""

from .fleet_settings import FleetSettings, check_installed

__all__ = ["FleetSettings", "check_installed"]
