"""Models split over ranks, and replicas of them: what keeps ranks together, and moves cached prefixes."""

from .agreement import Agreement
from .disagreement import DisagreementError
from .handover import SendReport, receive_prefixes, send_prefixes
from .heartbeat import Heartbeat, RankDiedError, StoreLostError
from .prefix_codec import decode_prefixes, encode_prefixes
from .prefix_export import export_prefixes
from .prefix_files import SaveReport, load_prefixes, save_prefixes
from .prefix_format import TransferError
from .prefix_import import CopyError, ImportReport, PrefixCounts
from .prefix_shard import PrefixShard
from .state_transfer import import_prefixes

__all__ = [
    "Agreement", "DisagreementError", "Heartbeat", "RankDiedError", "StoreLostError",
    # moving prefixes
    "export_prefixes", "import_prefixes", "save_prefixes", "load_prefixes", "send_prefixes",
    "receive_prefixes", "encode_prefixes", "decode_prefixes",
    "PrefixShard", "PrefixCounts", "ImportReport", "SaveReport", "SendReport", "TransferError", "CopyError",
]  # fmt: skip
