"""Into the pools: an export becomes part of the prefix cache on all ranks of a replica, or on none."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import shown
from ..all_ranks import Notes
from .cache_access import CacheAccess
from .codec import check_finite, decode_prefixes
from .forest import PrefixForest
from .format import PrefixFormat, TransferError
from .parts import shard_of
from .placement import ImportReport, Placement
from .shard import PrefixShard, join

logger = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview
Piece = PrefixShard | Bytes


class CopyError(RuntimeError):
    """A rank could not copy its part into its pools; no rank has imported anything, the replica serves on."""


class _DifferentImportsError(RuntimeError):
    """The ranks of a replica have come to hold different prefixes."""


@dataclass(frozen=True)
class ReceivedShard:
    """This rank's part of an export, decoded and joined.

    Attributes:
        shard: the part.
        source: tells the export from other exports of the same prefixes; empty where nothing tells.
    """

    shard: PrefixShard
    source: str = ""


def import_prefixes(engine: DynamicInferenceEngine, pieces: Piece | Sequence[Piece]) -> ImportReport:
    """Make the prefixes of an export cached prefixes of this engine.

    Every rank of a replica calls this, between steps. No rank writes anything before all ranks have found
    their pieces good. No prompt finds anything new before all ranks have copied their parts. The pools are
    written on the current stream.

    Known blocks and states stay as they are. New ones take blocks and slots that nobody holds. For these the
    cache evicts what was used longest ago and what the pieces do not name. What finds no room is left out,
    the least recently used first.

    An import counts as a use of every known and every new block and state. Afterwards these are the most
    recently used ones of this cache, and the exporter's order holds among them. A block is as recent as the
    most recently used state below the block. A block that a request holds becomes recent when the request
    ends.

    Args:
        engine: the engine to import into.
        pieces: parts of one export, each a PrefixShard or the bytes that `encode_prefixes` returned. Together
            they hold at least this rank's part. The exporter may have been split in another way. A split
            model had better pass bytes: bytes that are damaged on one rank are then refused on all ranks. The
            caller sees to it that all pieces, also those of other ranks, are of one export. Exports of the
            same prefixes cannot be told apart.

    Returns:
        What was imported, known and left out. Prefixes with salts under another key than this engine's are
            left out with a warning that names both keys' ids.

    Raises, on every rank alike:
        TransferError: pieces are damaged, do not fit this engine, or lack something; nothing has changed.
        ValueError: a piece, on any rank, is neither a PrefixShard nor bytes; or the engine caches no
            prefixes, has another eviction policy, or has no `weights_version`.
        RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
        CopyError: a copy failed on any rank. Hits may be lost: some prefixes may have been evicted.
    """
    access = CacheAccess.of(engine, "import_prefixes")

    def prepare() -> Callable[[], ReceivedShard]:
        parts = [pieces] if isinstance(pieces, Piece) else pieces
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise ValueError(f"pieces is {shown(pieces)}; accepted: a PrefixShard, bytes or a list of them")
        for index, piece in enumerate(parts):
            if not isinstance(piece, Piece):
                raise ValueError(f"pieces[{index}] is {shown(piece)}; accepted: a PrefixShard or bytes")
        return lambda: ReceivedShard(_joined(access, parts))

    return import_received(access, prepare)


def _joined(access: CacheAccess, parts: Sequence[Piece]) -> PrefixShard:
    own, shards = PrefixFormat.of(access), []
    for part in parts:
        shard = part if isinstance(part, PrefixShard) else decode_prefixes(part)
        shard.format.check_fits(own)
        shard.check()
        if isinstance(part, PrefixShard):
            check_finite(shard)  # `decode_prefixes` has done so
        shards.append(shard)
    return join(shards, shard_of(access.spec))


def import_received(access: CacheAccess, prepare: Callable[[], Callable[[], ReceivedShard]]) -> ImportReport:
    """Import this rank's part once every rank of the replica has received its own.

    Args:
        access: the cache to import into.
        prepare: checks the caller's arguments, and returns what receives this rank's part.

    Raises, on every rank alike and with nothing imported: as `import_filled`; and TransferError where a rank
        received a part of another export.
    """
    shards: list[PrefixShard] = []

    def prepared() -> Callable[[], tuple[PrefixFormat, PrefixForest, str]]:
        receive_part = prepare()

        def receive() -> tuple[PrefixFormat, PrefixForest, str]:
            received = receive_part()
            shard, own_shard = received.shard, shard_of(access.spec)
            shard.check()
            if shard.shard != own_shard:
                raise TransferError(f"shard is {shard.shard}; accepted: this rank's, {own_shard}")
            shards.append(shard)
            return shard.format, shard.forest, received.source

        return receive

    return import_filled(access, prepared, lambda placement: placement.write(shards[0].tensors))


def import_filled(
    access: CacheAccess,
    prepare: Callable[[], Callable[[], tuple[PrefixFormat, PrefixForest, str]]],
    fill: Callable[[Placement], None],
) -> ImportReport:
    """Import prefixes once every rank of the replica knows them; then each rank fills its blocks and slots.

    Args:
        access: the cache to import into.
        prepare: checks the caller's arguments, and returns what tells the prefixes: the format, the forest,
            and the `ReceivedShard.source`.
        fill: copies into the new blocks and slots of a placement.

    Raises, on every rank alike and with nothing imported:
        ValueError: `prepare` refused an argument on any rank; a rank with a wrong argument raises its own
            error.
        TransferError: a rank was not told its prefixes, or was told others than another rank.
        CopyError: a rank could not fill its part. Hits may be lost.

    Any other error means that this replica itself failed, for instance lost a rank. Ranks may then differ.
    """
    ranks = access.ranks

    def receive(notes: Notes) -> PrefixForest:
        own = PrefixFormat.of(access)
        tell = prepare()
        notes["prepared"] = True
        form, forest, source = tell()
        form.check_fits(own)
        notes["prefixes"], notes["exports"] = forest.digest, source
        return forest

    attempt = ranks.attempt(receive, same=("prefixes", "exports"))
    unprepared = [rank for rank, notes in enumerate(attempt.notes) if "prepared" not in notes]
    if attempt.error is not None and ranks.rank in unprepared:
        raise attempt.error
    if unprepared:
        raise ValueError(attempt.failure)
    forest = attempt.result(TransferError)
    with access.changing(CopyError, _DifferentImportsError):
        return _copy_in(access, forest, fill)


def _copy_in(access: CacheAccess, forest: PrefixForest, fill: Callable[[Placement], None]) -> ImportReport:
    placement = Placement(access, forest)

    def copy(notes: Notes) -> None:
        try:
            placement.place()
            fill(placement)
        finally:
            notes["caches"] = placement.digest()

    try:
        attempt = access.ranks.attempt(copy, same=("caches",))
        if attempt.difference:  # perhaps because a rank failed before it had evicted what the others evicted
            reasons = "; and ".join(filter(None, (attempt.failure, attempt.difference)))
            raise _DifferentImportsError(f"prefixes could not be imported: {reasons}") from attempt.error
        attempt.result(lambda reason: CopyError(f"prefixes could not be imported: {reason}"))
        report = placement.publish()
    except BaseException as error:
        expected = isinstance(error, (CopyError, _DifferentImportsError))
        with nullcontext() if expected else suppress(Exception):
            placement.release()  # after an interrupt the engine puts the books in order, also if this fails
        raise
    placement.release()
    if report.other_key.prefixes:
        logger.warning(
            "mambaslots: %d prefixes are left out of an import: their salts are hashed under the key %s, and "
            "those of this engine under %s",
            report.other_key.prefixes,
            forest.salt_key_id,
            access.salt_key.key_id,
        )
    return report
