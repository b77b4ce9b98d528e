"""Moving cached prefixes, KV blocks and states together, between engines, files and replicas.

    engine -- export_prefixes --> PrefixShard -- encode_prefixes --> bytes
    engine <- import_prefixes --- PrefixShard <- decode_prefixes --- bytes
    engine <- import_prefixes -------------------------------------- bytes
    engine -- save_prefixes ----> directory --- load_prefixes ---> engine
    engine -- send_prefixes ----> two-party groups --- receive_prefixes ---> engine

Each rank of a split model exports and imports its part. The two sides may be split differently, by tensor and
by pipeline ranks: parts are cut and joined by layers, heads and groups. What is damaged, or of another model,
is refused on all ranks of a replica, and nothing changes.
"""

from collections.abc import Callable, Sequence

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..validation import shown
from .prefix_codec import decode_prefixes
from .prefix_format import PrefixFormat, shard_of
from .prefix_import import ImportReport, Obtained, import_obtained
from .prefix_shard import PrefixShard, join

_Bytes = bytes | bytearray | memoryview
_Piece = PrefixShard | _Bytes


def import_prefixes(engine: DynamicInferenceEngine, pieces: _Piece | Sequence[_Piece]) -> ImportReport:
    """Make the prefixes of an export cached ones of this engine.

    `pieces`: parts of one export, each a PrefixShard or what `encode_prefixes` made of it, that together hold
    at least this rank's part; the split may be another. Several ranks had better pass bytes: what is damaged
    on one is then refused on all. That all parts, also those of different ranks, are of one export is the
    caller's to see to: exports of the same prefixes cannot be told apart.

    Every rank of a replica calls this, between steps; no rank changes anything before all have found their
    pieces good, and nothing can be found before all have copied theirs. Known blocks and states are kept as
    they are. Others take the room that nobody holds, evicting what was used longest ago of what the pieces
    do not name; what does not fit is left out, the least recently used first. Writes the pools on the
    current stream.

    An import is a use of all known blocks and states and of all new ones, at once: afterwards they are the
    most recently used ones here, among themselves in the exporter's order, a block with the most recently
    used state below it. Blocks that a request holds take their place when it ends, as ever.

    Raises, on every rank alike, TransferError for pieces that are damaged, do not fit this engine or lack
    something, with nothing changed; ValueError for what is no piece, if only on one rank, or an engine that
    caches no prefixes, does so under another policy than "lru" or has no `weights_version`; RuntimeError
    during a step, while suspended, or, a CopyError, where a copy failed (that may have cost hits).
    """

    def prepare() -> Callable[[], Obtained]:
        parts = [pieces] if isinstance(pieces, _Piece) else pieces
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise ValueError(f"pieces is {shown(pieces)}; accepted: a PrefixShard, bytes or a list of them")
        for index, piece in enumerate(parts):
            if not isinstance(piece, _Piece):
                raise ValueError(f"pieces[{index}] is {shown(piece)}; accepted: a PrefixShard or bytes")
        return lambda: Obtained(_joined(engine, parts))

    return import_obtained(engine, "import_prefixes", prepare)


def _joined(engine: DynamicInferenceEngine, parts: Sequence[_Piece]) -> PrefixShard:
    own, shards = PrefixFormat.of(engine), []
    for part in parts:
        shard = part if isinstance(part, PrefixShard) else decode_prefixes(part)
        shard.format.check_fits(own)
        shard.check()
        shards.append(shard)
    return join(shards, shard_of(engine))
