"""Into the pools: an export becomes part of the prefix cache on all ranks of a replica, or on none."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import refused
from ..all_ranks import Notes
from .exports import CacheAccess
from .format import PrefixForest, TransferError, shard_of
from .placement import ImportReport, Placement
from .shard import PrefixShard, decode_prefixes, join

logger = logging.getLogger(__name__)

AnyShard = PrefixShard | bytes | bytearray | memoryview


class CopyError(RuntimeError):
    """A rank could not copy its part into its pools; no rank has imported anything, the replica serves on."""


class ReceivedPrefixes(NamedTuple):
    """What a rank has received of an export whose format fits this engine."""

    forest: PrefixForest
    fill: Callable[[Placement], None]  # copies into the new blocks and slots
    source: str = ""  # distinguishes the export from others of the same prefixes, where something does

    @classmethod
    def of(cls, shard: PrefixShard, source: str = "") -> "ReceivedPrefixes":
        return cls(shard.forest, lambda placement: placement.write(shard.tensors), source)


def import_prefixes(engine: DynamicInferenceEngine, pieces: AnyShard | Sequence[AnyShard]) -> ImportReport:
    """Make the prefixes of an export cached prefixes of this engine.

    Every rank of a replica calls this, between steps. No rank writes anything before all ranks have found
    their pieces good. No prompt finds anything new before all ranks have copied their parts. The pools are
    written on the current stream.

    Known blocks and states stay as they are. New ones are stored in free blocks and slots. For these the
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
            caller ensures that all pieces, also those of other ranks, are of one export. Exports of the same
            prefixes cannot be distinguished.

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
    access = CacheAccess(engine, "import_prefixes")

    def received() -> ReceivedPrefixes:
        parts = [pieces] if isinstance(pieces, AnyShard) else pieces
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise refused("pieces", pieces, "a PrefixShard, bytes or a list of them")
        for index, part in enumerate(parts):
            if not isinstance(part, AnyShard):
                raise refused(f"pieces[{index}]", part, "a PrefixShard or bytes")
        own_format = access.format()
        shards = []
        for part in parts:
            shard = part if isinstance(part, PrefixShard) else decode_prefixes(part)
            shard.format.check_fits(own_format)
            if isinstance(part, PrefixShard):
                shard.check()  # `decode_prefixes` has done so
            shards.append(shard)
        return ReceivedPrefixes.of(join(shards, shard_of(access.spec)))

    return import_received(access, received)


def import_received(access: CacheAccess, receive: Callable[[], ReceivedPrefixes]) -> ImportReport:
    """Import what all ranks have received; all ranks raise alike, with nothing imported.

    ValueError: an argument is wrong on a rank, which raises its own error. TransferError: a rank received
    nothing, or other prefixes than another one. CopyError: a rank could not fill its part; hits may be lost.
    After any other error of this replica, ranks may differ.
    """

    def work(notes: Notes) -> ReceivedPrefixes:
        try:
            access.format()  # first: an engine without a weights version waits for nothing
            incoming = receive()
        except ValueError as error:
            notes["argument"] = not isinstance(error, TransferError)
            raise
        notes["prefixes"], notes["exports"] = incoming.forest.digest, incoming.source
        return incoming

    attempt = access.attempt(work, same=("prefixes", "exports"))
    if any(notes.get("argument") for notes in attempt.notes):
        if isinstance(attempt.error, ValueError) and not isinstance(attempt.error, TransferError):
            raise attempt.error
        raise ValueError(attempt.failure)
    incoming = attempt.result(TransferError)
    with access.engine.changing_cache(CopyError):
        return _copy_in(access, incoming)


def _copy_in(access: CacheAccess, incoming: ReceivedPrefixes) -> ImportReport:
    placement = Placement(access, incoming.forest)

    def copy(notes: Notes) -> None:
        try:
            placement.place()
            incoming.fill(placement)
        finally:
            notes["caches"] = placement.digest()

    try:
        attempt = access.attempt(copy, same=("caches",))
        if attempt.difference:  # perhaps because a rank failed before it had evicted what the others evicted
            reasons = "; and ".join(filter(None, (attempt.failure, attempt.difference)))
            raise RuntimeError(f"prefixes could not be imported: {reasons}") from attempt.error
        attempt.result(lambda reason: CopyError(f"prefixes could not be imported: {reason}"))
        report = placement.commit()
    except BaseException as error:
        with nullcontext() if isinstance(error, CopyError) else suppress(Exception):
            placement.release()  # after other errors the engine repairs its cache, also if this fails
        raise
    placement.release()
    if report.other_key.prefixes:
        logger.warning(
            "mambaslots: %d prefixes are left out of an import: their salts are hashed under the key %s, and "
            "those of this engine under %s",
            report.other_key.prefixes,
            incoming.forest.salt_key_id,
            access.engine.salt_key.key_id,
        )
    return report
