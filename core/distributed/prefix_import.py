"""Into the pools: another engine's prefixes become cached ones of this engine, on all ranks or on none."""

import hashlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import torch

from ..inference.contexts.dynamic_context import DynamicInferenceContext
from ..inference.contexts.kv_block_allocator import Parent
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from .prefix_export import checked_slots, write_rows
from .prefix_failures import described, differences, failures
from .prefix_forest import PrefixForest
from .prefix_format import PrefixFormat, TransferError, shard_of
from .prefix_shard import PrefixShard


class CopyError(RuntimeError):
    """A rank could not copy its part; on every rank nothing was imported, alike: the replica serves on."""


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
        known: here already, and kept as they were but for their recency.
        left_out: for want of room: of KV blocks or state slots that nobody holds.
        failure: why nothing was imported; empty where nothing failed.
    """

    imported: PrefixCounts = PrefixCounts()
    known: PrefixCounts = PrefixCounts()
    left_out: PrefixCounts = PrefixCounts()
    failure: str = ""


@dataclass(frozen=True)
class Obtained:
    """A rank's part of an export. `source`: tells it from other exports of the same prefixes, if that can."""

    shard: PrefixShard
    source: str = ""


def import_obtained(
    engine: DynamicInferenceEngine, call: str, prepare: Callable[[], Callable[[], Obtained]]
) -> ImportReport:
    """Import this rank's part once all ranks of the replica have obtained theirs.

    `prepare` checks the arguments and returns what obtains the part. `call`: its name, for errors. Raises on
    all ranks alike, with nothing changed: ValueError where a rank's arguments are wrong, its own one there;
    TransferError where a rank could not obtain its part, or obtained one of another export; CopyError where
    one could not copy it (that may have cost evicted hits). What else fails, such as a rank of this replica,
    raises something else, perhaps not on all ranks.
    """
    slots = _checked_importer(engine, call)
    spec = engine.context.spec
    shard, cause, reason, prepared = None, None, "", False
    digest = source = ""
    try:
        own = PrefixFormat.of(engine)
        obtain = prepare()
        prepared = True
        obtained = obtain()
        shard, source = obtained.shard, obtained.source
        shard.format.check_fits(own)
        shard.check()
        if shard.shard != shard_of(engine):
            raise TransferError(f"shard is {shard.shard}; accepted: this rank's, {shard_of(engine)}")
        digest = shard.forest.digest
    except Exception as error:
        cause, reason = error, described(error)
    told = spec.groups.gather((prepared, reason, digest, source), spec.device)
    failure = failures([text for _, text, _, _ in told])
    failure = failure or differences("prefixes", [name for _, _, name, _ in told])
    failure = failure or differences("exports", [name for _, _, _, name in told])
    if cause is not None and not prepared:
        raise cause
    if not all(each for each, _, _, _ in told):
        raise ValueError(failure)
    if failure or shard is None:
        raise TransferError(failure) from cause
    return _apply(engine, PrefixImport(engine.context, slots, shard))


def _checked_importer(engine: DynamicInferenceEngine, call: str) -> MambaSlotAllocator:
    """The slots of an engine that can import; by what all ranks of a replica have alike."""
    slots = checked_slots(engine, call)
    policy = engine.config.prefix_caching_eviction_policy
    if policy != "lru":
        raise ValueError(
            f"prefix_caching_eviction_policy is {policy!r}; accepted: 'lru', because under the others a "
            "block leaves with its last user, and an imported one has none"
        )
    return slots


def _apply(engine: DynamicInferenceEngine, importing: "PrefixImport") -> ImportReport:
    cause, reason, spec = None, "", engine.context.spec
    try:
        try:
            importing.place()
            importing.write()
        except Exception as error:
            cause, reason = error, described(error)
        told = spec.groups.gather((reason, importing.places_digest()), spec.device)
        failure = failures([text for text, _ in told])
        parted = differences("caches", [places for _, places in told])
        if parted:  # also where one failed before it had evicted what others did
            text = f"{failure}; and {parted}" if failure else parted
            raise RuntimeError(f"prefixes could not be imported: {text}") from cause
        if failure:
            raise CopyError(f"prefixes could not be imported: {failure}") from cause
        return importing.publish()
    finally:
        importing.release()


class PrefixImport:
    """One import: `place`, `write`, `publish`, each once and in this order, and `release` whatever happened.

    A *path* is what a state needs: the blocks from the nearest node that an earlier path holds, or from the
    root, down to its own; first those that are known, then new ones. Most recently used states come first,
    so a block is held by the path of the most recently used state below it; given back in the opposite
    order, blocks are as recent among themselves as they were at the exporter.

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
        self._paths: list[list[int]] = []  # of each state the blocks held, with one reference each
        self._new: list[list[int]] = []  # of each path the nodes, in order, that were not known
        self._known_slot_of: dict[int, int] = {}  # of each node with a known state its slot, pinned
        self._slot_of: dict[int, int] = {}  # of each node with a state to come its reserved slot

    def place(self) -> None:
        """Hold all known blocks and states; allocate and reserve for the others what there is room for.

        May evict, as computing would, but nothing that is known. The same decisions on each rank.
        """
        self._hold_known()
        slots, room = self._slots, self._slots.available_count
        wanted: list[int] = []
        for state, held in zip(self._forest.states, self._paths, strict=True):
            if state not in self._known_slot_of and len(wanted) < room and self._allocate(state, held):
                wanted.append(state)
        reserved = slots.reserve([self._block_of[state] for state in wanted])
        self._slot_of = dict(zip(wanted, reserved, strict=True))

    def _hold_known(self) -> None:
        kv, slots, forest = self._kv, self._slots, self._forest
        seen: set[int] = set()
        for state in forest.states:
            held: list[int] = []
            self._paths.append(held)
            path = self._path_to(state, seen)
            if path and ((before := forest.parents[path[0]]) < 0 or before in self._block_of):
                keys, tokens = [forest.keys[node] for node in path], [forest.tokens[node] for node in path]
                known = kv.match_chain(self._parent(before), keys, tokens)
                kv.add_references(known)
                held += known
                self._block_of.update(zip(path, known, strict=False))
            seen.update(path)
            if state in self._block_of and slots.has_state(self._block_of[state]):
                slot = slots.get_slot(self._block_of[state])
                slots.pin(slot)
                self._known_slot_of[state] = slot

    def _allocate(self, state: int, held: list[int]) -> bool:
        """Blocks, into `held`, for what is missing above a state; False where they have no room."""
        missing = self._path_to(state, self._block_of)
        if not self._kv.is_memory_available(len(missing)):
            return False
        blocks = self._kv.allocate_memory_blocks(len(missing))
        held += blocks
        self._block_of.update(zip(missing, blocks, strict=True))
        self._new.append(missing)
        return True

    def _path_to(self, state: int, above: Container[int]) -> list[int]:
        """The nodes down to `state` from below the nearest one of `above`, or from the root."""
        path: list[int] = []
        node = state
        while node >= 0 and node not in above:
            path.append(node)
            node = self._forest.parents[node]
        return path[::-1]

    def _parent(self, before: int) -> Parent:
        """What the KV index calls the node `before`, which is held, or the salt it stands for."""
        return self._block_of[before] if before >= 0 else self._forest.salts[-1 - before]

    def write(self) -> None:
        """Copy KV and states to where nobody reads yet."""
        tensors, slots = self._shard.tensors, self._slots
        nodes = [node for path in self._new for node in path]
        row_of = {node: row for row, node in enumerate(self._forest.states)}
        rows, reserved = [row_of[node] for node in self._slot_of], list(self._slot_of.values())
        channel = 0
        with torch.inference_mode():
            for name in ("conv_x", "conv_B", "conv_C"):
                units, width = tensors[name].shape[2:4]
                part = slots.conv_states.narrow(2, channel, units * width)
                write_rows(torch.unflatten(part, 2, (units, width)), 1, reserved, tensors[name], rows)
                channel += units * width
            write_rows(slots.ssm_states, 1, reserved, tensors["ssm"], rows)
            write_rows(self._kv_cache, 2, [self._block_of[node] for node in nodes], tensors["kv"], nodes)

    def places_digest(self) -> str:
        """Names what `place` decided."""
        places = [self._paths, sorted(self._slot_of.items()), sorted(self._known_slot_of.items())]
        return hashlib.sha256(repr(places).encode()).hexdigest()

    def publish(self) -> ImportReport:
        """Register the blocks; commit the new states and use the known ones, most recently used last."""
        forest, kv, slots = self._forest, self._kv, self._slots
        known_states = set(self._known_slot_of)
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
            if node in self._known_slot_of:
                slots.note_use(self._known_slot_of[node])
            elif node in self._slot_of and slots.commit([self._slot_of[node]]) == [self._slot_of[node]]:
                committed.add(node)
        known = self._block_of.keys() - {node for path in self._new for node in path}
        rest = set(range(len(forest))) - known - registered
        states = set(forest.states) - known_states - committed
        return ImportReport(
            imported=self._counts(registered, committed),
            known=self._counts(known, known_states),
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
        slots.release_reservation([slot for slot in self._slot_of.values() if slots.is_reserved(slot)])
        self._slot_of.clear()
        while self._known_slot_of:
            slots.unpin(self._known_slot_of.popitem()[1])
        while self._paths:
            self._kv.release_memory_blocks(self._paths.pop())
