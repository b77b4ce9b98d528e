"""Models split over ranks, and replicas of them: what keeps ranks together, and moves cached prefixes."""

from .heartbeat import Heartbeat, RankDiedError
from .lockstep.following import follow
from .lockstep.leading_engine import LeadingEngine
from .prefill_decode.disaggregated_engine import DisaggregatedEngine, PrefillCounts
from .prefill_decode.prefill_client import RemotePrefill
from .prefill_decode.prefill_worker import PrefillWorker
from .routing.state_events import StateEvents, decode_events, encode_events
from .routing.state_index import StateIndex
from .routing.state_publisher import StatePublisher
from .routing.state_router import ReplicaLoad, RouteRequest, StateRouter
from .transfer.export import export_prefixes, recent_states
from .transfer.files import SaveReport, load_prefixes, save_prefixes
from .transfer.format import TransferError
from .transfer.hand_over import SendReport, TransferChannel, receive_prefixes, send_prefixes
from .transfer.import_ import CopyError, ImportReport, PrefixCounts, import_prefixes
from .transfer.shard import PrefixShard, decode_prefixes, encode_prefixes

__all__ = [
    "Heartbeat", "RankDiedError",
    # routing to replicas
    "StateRouter", "RouteRequest", "ReplicaLoad", "StateEvents", "StateIndex", "StatePublisher",
    "encode_events", "decode_events",
    # an engine of all ranks for one caller
    "LeadingEngine", "follow",
    # moving prefixes
    "export_prefixes", "import_prefixes", "save_prefixes", "load_prefixes", "send_prefixes",
    "receive_prefixes", "TransferChannel", "recent_states", "encode_prefixes", "decode_prefixes",
    # prefill apart from decode
    "PrefillWorker", "DisaggregatedEngine", "RemotePrefill", "PrefillCounts",
    # what they return and raise
    "PrefixShard", "PrefixCounts", "ImportReport", "SaveReport", "SendReport", "TransferError", "CopyError",
]  # fmt: skip
