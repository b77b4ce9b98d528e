"""Moving cached prefixes, KV blocks and states together, between engines, files and replicas.

    engine -- export_prefixes --> PrefixShard -- encode_prefixes --> bytes
    engine <- import_prefixes --- PrefixShard <- decode_prefixes --- bytes
    engine -- save_prefixes ----> directory --- load_prefixes ---> engine
    engine -- send_prefixes ----> two-party groups --- receive_prefixes ---> engine

Each rank of a split model exports and imports its part. The two sides may be split differently, by tensor and
by pipeline ranks: parts are cut and joined by layers, heads and groups. What is damaged, or of another model,
is refused on all ranks of a replica, and nothing changes.
"""

from collections.abc import Sequence

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..validation import shown
from .handover import SendReport, receive_prefixes, send_prefixes
from .prefix_codec import decode_prefixes, encode_prefixes
from .prefix_export import PrefixName, export_prefixes
from .prefix_files import SaveReport, load_prefixes, save_prefixes
from .prefix_format import PrefixFormat, TransferError, shard_of
from .prefix_import import ImportReport, PrefixCounts, import_obtained
from .prefix_shard import PrefixShard, join

__all__ = [
    "export_prefixes", "import_prefixes", "save_prefixes", "load_prefixes", "send_prefixes",
    "receive_prefixes", "encode_prefixes", "decode_prefixes", "join",
    "PrefixShard", "PrefixFormat", "PrefixName",
    "ImportReport", "PrefixCounts", "SaveReport", "SendReport", "TransferError",
]  # fmt: skip


def import_prefixes(
    engine: DynamicInferenceEngine, pieces: PrefixShard | Sequence[PrefixShard]
) -> ImportReport:
    """Make the prefixes of an export cached ones of this engine.

    `pieces`: parts of one export that together hold at least this rank's part; the split may be another.
    Every rank of a replica calls this, between steps; no rank changes anything before all have found their
    pieces good, and nothing can be found before all have copied theirs. Known blocks and states are left as
    they are. Others take the room that nobody holds, evicting what was used longest ago; what does not fit
    is left out, the least recently used first. Recency is the exporter's. Writes the pools on the current
    stream.

    Raises, on every rank alike, TransferError for pieces that are damaged, do not fit this engine or lack
    something, with nothing changed; ValueError for an engine that caches no prefixes, or under another policy
    than "lru"; RuntimeError during a step, while suspended, or where a copy failed (that may have cost hits).
    """
    parts = [pieces] if isinstance(pieces, PrefixShard) else pieces
    if not isinstance(parts, Sequence) or not all(isinstance(piece, PrefixShard) for piece in parts):
        raise ValueError(f"pieces is {shown(pieces)}; accepted: a PrefixShard or a list of them")

    def obtain() -> PrefixShard:
        own = PrefixFormat.of(engine)
        for piece in parts:
            piece.format.check_fits(own)
            piece.check()
        return join(parts, shard_of(engine))

    return import_obtained(engine, "import_prefixes", obtain)
