"""What processes that serve one model say and send to each other: ranks of a split model, and replicas.

Two words: the *ranks* of a replica hold parts of one model and make every step together; *replicas* hold the
same model, and move cached prefixes between them.

channel                     typed messages between processes, encrypted
all_ranks                   work that succeeds on all ranks of a replica, or fails on all with one text
heartbeat                   which rank died
lockstep/leading_engine     the engine of rank 0, which one caller drives as if the model were whole
lockstep/following          the calls as messages; `follow`, which makes them on every other rank
lockstep/followers          what rank 0 knows of the others: which calls they made, and how each ended
transfer/                   cached prefixes as bytes, as files, and from replica to replica
prefill_decode/             long prompts are computed by one engine, and resumed by another one
routing/                    which states a replica holds, and which replica a request goes to

Of each other, the folders import one thing: `prefill_decode` imports `transfer`. All but `routing` import the
three files. May import `engines`, `contexts`, `cache`, `kernels`; nothing of HTTP or of Ray.
"""

from .heartbeat import Heartbeat
from .lockstep.following import follow
from .lockstep.leading_engine import LeadingEngine
from .prefill_decode.disaggregated_engine import DisaggregatedEngine
from .prefill_decode.prefill_worker import PrefillWorker
from .routing.state_publisher import StatePublisher
from .routing.state_router import StateRouter
from .transfer.export import export_prefixes
from .transfer.files import load_prefixes, save_prefixes
from .transfer.hand_over import TransferChannel
from .transfer.import_ import import_prefixes
from .transfer.shard import decode_prefixes, encode_prefixes

__all__ = [
    # a model split over ranks
    "Heartbeat", "LeadingEngine", "follow",
    # moving prefixes
    "export_prefixes", "import_prefixes", "encode_prefixes", "decode_prefixes", "save_prefixes",
    "load_prefixes", "TransferChannel",
    # prefill apart from decode
    "PrefillWorker", "DisaggregatedEngine",
    # routing to replicas
    "StateRouter", "StatePublisher",
]  # fmt: skip
