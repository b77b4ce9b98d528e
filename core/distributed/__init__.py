"""Models split over ranks: what keeps the ranks together."""

from .agreement import Agreement, DisagreementError
from .heartbeat import Heartbeat, RankDiedError, StoreLostError
from .state_transfer import (
    ImportReport,
    PrefixCounts,
    PrefixShard,
    SaveReport,
    SendReport,
    TransferError,
    decode_prefixes,
    encode_prefixes,
    export_prefixes,
    import_prefixes,
    load_prefixes,
    receive_prefixes,
    save_prefixes,
    send_prefixes,
)

__all__ = [
    "Agreement", "DisagreementError", "Heartbeat", "RankDiedError", "StoreLostError",
    # moving prefixes
    "export_prefixes", "import_prefixes", "save_prefixes", "load_prefixes", "send_prefixes",
    "receive_prefixes", "encode_prefixes", "decode_prefixes",
    "PrefixShard", "PrefixCounts", "ImportReport", "SaveReport", "SendReport", "TransferError",
]  # fmt: skip
