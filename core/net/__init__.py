"""What processes that serve one model say and send to each other.

The *ranks* of a replica hold parts of one model and make every step together; *replicas* hold the same model,
and move cached prefixes between them.

message_sockets, all_ranks: how processes talk, and know that one is lost; work that all ranks do or none
lockstep/             one rank leads, the others make its calls
transfer/             prefixes to another replica
prefill_decode/       prefill apart from decode
routing/              which replica holds a prompt's states

A file of messages in lockstep, transfer and prefill_decode lists what each sends. A name is imported at its
first use: a router needs no engine.
"""

from typing import TYPE_CHECKING

from ..lazy_names import importer

if TYPE_CHECKING:
    from .lockstep.follower import follow
    from .lockstep.leading_engine import LeadingEngine
    from .prefill_decode.disaggregated_engine import DisaggregatedEngine
    from .prefill_decode.prefill_worker import PrefillWorker
    from .routing.state_events import StatePublisher
    from .routing.state_router import StateRouter
    from .transfer.exports import export_prefixes
    from .transfer.hand_over import TransferChannel
    from .transfer.imports import import_prefixes
    from .transfer.prefix_files import load_prefixes, save_prefixes
    from .transfer.shard import decode_prefixes, encode_prefixes

__all__ = [
    # a model split over ranks
    "LeadingEngine", "follow",
    # moving prefixes
    "export_prefixes", "import_prefixes", "encode_prefixes", "decode_prefixes", "save_prefixes",
    "load_prefixes", "TransferChannel",
    # prefill apart from decode
    "PrefillWorker", "DisaggregatedEngine",
    # routing to replicas
    "StateRouter", "StatePublisher",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = importer(globals())
