"""Into the pools: another engine's prefixes become cached ones of this engine, on all ranks or on none."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..inference.contexts.dynamic_context import DynamicInferenceContext
from ..inference.contexts.kv_block_allocator import Parent
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from .prefix_export import checked_slots, write_rows
from .prefix_forest import PrefixForest
from .prefix_format import PrefixFormat, TransferError, shard_of
from .prefix_replica import described, failures, gathered
from .prefix_shard import PrefixShard


@dataclass(frozen=True)
class PrefixCounts:
    """`prefixes`: longest ones, by the state at their end. `tokens`: those of `blocks`."""

    prefixes: int = 0
    blocks: int = 0
    states: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class ImportReport:
    """What became of the prefixes of an export; the same on every rank of a replica.

    Attributes:
        imported: written into this cache.
        known: here already, and left as they were.
        left_out: for want of room: of KV blocks or state slots that nobody holds.
        failure: why nothing was imported; empty where nothing failed.
    """

    imported: PrefixCounts = PrefixCounts()
    known: PrefixCounts = PrefixCounts()
    left_out: PrefixCounts = PrefixCounts()
    failure: str = ""


def import_obtained(
    engine: DynamicInferenceEngine, call: str, obtain: Callable[[], PrefixShard]
) -> ImportReport:
    """Import what `obtain` returns, this rank's part, once all ranks of the replica have obtained theirs.

    `call`: its name, for errors. Raises on all ranks alike, with nothing changed: TransferError where a rank
    could not obtain its part; RuntimeError where one could not copy it (that may have cost evicted hits).
    """
    slots = checked_importer(engine, call)
    spec = engine.context.spec
    shard, cause, reason, digest = None, None, "", ""
    try:
        shard = obtain()
        shard.format.check_fits(PrefixFormat.of(engine))
        shard.check()
        if shard.shard != shard_of(engine):
            raise TransferError(f"shard is {shard.shard}; accepted: this rank's, {shard_of(engine)}")
        digest = shard.forest.digest
    except Exception as error:
        cause, reason = error, described(error)
    told = gathered(spec, (reason, digest))
    failure = failures([text for text, _ in told])
    if not failure and len({forest for _, forest in told}) > 1:
        others = [rank for rank, (_, forest) in enumerate(told) if forest != told[0][1]]
        failure = f"ranks {others} of the replica have other prefixes than rank 0; accepted: the same on all"
    if failure or shard is None:
        raise TransferError(failure) from cause
    return _apply(engine, PrefixImport(engine.context, slots, shard))


def checked_importer(engine: DynamicInferenceEngine, call: str) -> MambaSlotAllocator:
    """The slots of an engine that can import; every rank of a replica raises alike."""
    slots = checked_slots(engine, call)
    policy = engine.config.prefix_caching_eviction_policy
    if policy != "lru":
        raise ValueError(
            f"prefix_caching_eviction_policy is {policy!r}; accepted: 'lru', because under the others a "
            "block leaves with its last user, and an imported one has none"
        )
    PrefixFormat.of(engine)
    return slots


def _apply(engine: DynamicInferenceEngine, importing: "PrefixImport") -> ImportReport:
    cause, reason = None, ""
    try:
        try:
            importing.place()
            importing.write()
        except Exception as error:
            cause, reason = error, described(error)
        told = gathered(engine.context.spec, (reason, importing.places_digest()))
        failure = failures([text for text, _ in told])
        if not failure and len({places for _, places in told}) > 1:
            failure = "the ranks of the replica have different caches; accepted: ranks that decided alike"
        if failure:
            raise RuntimeError(f"prefixes could not be imported: {failure}") from cause
        return importing.publish()
    finally:
        importing.release()


class PrefixImport:
    """One import: `place`, `write`, `publish`, each once and in this order, and `release` whatever happened.

    A *path* is what a state needs: the blocks from the nearest node that an earlier path holds, or from the
    root, down to its own. Most recently used states come first, so a block is held by the path of the most
    recently used state below it; given back in the opposite order, blocks are as recent as they were.

    Nothing can be found before `publish`. A state that has no room is left out, and a less recently used one
    further up, which needs less, may still be taken.
    """

    def __init__(
        self, context: DynamicInferenceContext, slots: MambaSlotAllocator, shard: PrefixShard
    ) -> None:
        self._kv_cache = context.kv_cache
        self._kv = context.kv_block_allocator
        self._slots = slots
        self._shard = shard
        self._forest: PrefixForest = shard.forest
        self._block_of: dict[int, int] = {}  # of each node that is held
        self._paths: list[list[int]] = []  # blocks held, with one reference each
        self._new: list[list[int]] = []  # of each path the nodes, in order, that were not known
        self._pinned: list[int] = []
        self._slot_of: dict[int, int] = {}  # of each node with a state to come its reserved slot
        self._known_states: set[int] = set()

    def place(self) -> None:
        """Hold the known blocks and states; allocate and reserve for the others what there is room for.

        May evict, as computing would. The same decisions on each rank.
        """
        for node in self._forest.states:
            self._place(node)

    def _place(self, state: int) -> None:
        kv, slots, forest = self._kv, self._slots, self._forest
        path, before = [], state
        while before >= 0 and before not in self._block_of:
            path.append(before)
            before = forest.parents[before]
        path.reverse()
        parent = self._parent(before)
        known: list[int] = []
        if isinstance(parent, bytes) or kv.is_registered(parent):
            keys, tokens = [forest.keys[node] for node in path], [forest.tokens[node] for node in path]
            known = kv.match_chain(parent, keys, tokens)
        missing = path[len(known) :]
        has_state = not missing and slots.has_state(known[-1] if path else self._block_of[state])
        if not has_state and not slots.available_count:
            return
        if not kv.is_memory_available(len(missing), kv.count_cached(known)):
            return
        held: list[int] = []
        self._paths.append(held)
        kv.add_references(known)
        held += known
        self._block_of.update(zip(path, known, strict=False))
        held += kv.allocate_memory_blocks(len(missing))
        self._block_of.update(zip(path, held, strict=True))
        self._new.append(missing)
        block = self._block_of[state]
        if has_state:
            slot = slots.get_slot(block)
            slots.pin(slot)
            self._pinned.append(slot)
            self._known_states.add(state)
        else:
            self._slot_of[state] = slots.reserve([block])[0]

    def _parent(self, before: int) -> Parent:
        """What the KV index calls the node `before`, which is held, or the salt it stands for."""
        return self._block_of[before] if before >= 0 else self._forest.salts[-1 - before]

    def write(self) -> None:
        """Copy KV and states to where nobody reads yet."""
        tensors, slots = self._shard.tensors, self._slots
        nodes = [node for path in self._new for node in path]
        row_of = {node: row for row, node in enumerate(self._forest.states)}
        rows, reserved = [row_of[node] for node in self._slot_of], list(self._slot_of.values())
        with torch.inference_mode():
            conv = torch.cat(
                [tensors[name][:, rows].flatten(2, 3) for name in ("conv_x", "conv_B", "conv_C")], 2
            )
            write_rows(slots.conv_states, 1, reserved, conv)
            write_rows(slots.ssm_states, 1, reserved, tensors["ssm"][:, rows])
            write_rows(
                self._kv_cache, 2, [self._block_of[node] for node in nodes], tensors["kv"][:, :, nodes]
            )

    def places_digest(self) -> str:
        """Names what `place` decided."""
        places = [self._paths, sorted(self._slot_of.items()), sorted(self._pinned)]
        return hashlib.sha256(repr(places).encode()).hexdigest()

    def publish(self) -> ImportReport:
        """Register the blocks and commit the states, the least recently used ones first."""
        forest, kv = self._forest, self._kv
        registered: set[int] = set()
        for path in filter(None, self._new):
            parent = self._parent(forest.parents[path[0]])
            if isinstance(parent, int) and not kv.is_registered(parent):
                continue  # below a hash collision
            blocks = [self._block_of[node] for node in path]
            keys, tokens = [forest.keys[node] for node in path], [forest.tokens[node] for node in path]
            canonical = kv.register_chain(parent, blocks, keys, tokens)
            registered.update(path[: len(canonical)])
        committed: set[int] = set()
        for node in reversed(forest.states):
            if node in self._slot_of:
                slot = self._slot_of[node]
                if self._slots.commit([slot]) == [slot]:
                    committed.add(node)
        known = self._block_of.keys() - {node for path in self._new for node in path}
        rest = set(range(len(forest))) - known - registered
        states = set(forest.states) - self._known_states - committed
        return ImportReport(
            imported=self._counts(registered, committed),
            known=self._counts(known, self._known_states),
            left_out=self._counts(rest, states),
        )

    def _counts(self, blocks: Iterable[int], states: set[int]) -> PrefixCounts:
        number = len(set(blocks))
        return PrefixCounts(
            prefixes=len(states & self._forest.leaves),
            blocks=number,
            states=len(states),
            tokens=number * self._forest.block_size_tokens,
        )

    def release(self) -> None:
        """Let go of all that is held and reserved: what was not published becomes free, the rest cached."""
        slots = self._slots
        slots.release_reservation([slot for slot in self._slot_of.values() if slots.is_reserved(slot)][::-1])
        self._slot_of.clear()
        while self._pinned:
            self._slots.unpin(self._pinned.pop())
        while self._paths:
            self._kv.release_memory_blocks(self._paths.pop())
