"""Out of the pools: an engine's cached prefixes as one rank's part of an export."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain, salt_bytes
from ...inference.contexts.request_states import StatePool
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import instance, integers, refused
from ..all_ranks import Attempt, Notes, attempt
from .format import KV, PrefixForest, PrefixFormat, segments_of, shard_of
from .shard import PrefixShard

STAGING_BYTES = 256 << 20
"""The most bytes of a pool that are copied at once: the memory that a copy takes besides its two sides."""
PrefixName = tuple[Sequence[int] | Tensor, bytes | str | None] | int
"""The tokens of a prefix, and the salt under which the prefix is cached; or the hash of its last block, which
has a state. The hash says nothing about the salt."""


class CacheAccess:
    """One rank's prefix cache, between two steps of its engine; valid until the engine is called again.

    Attributes:
        pools: name of an export's tensor -> a view of the pool. "kv" is [attention layers, blocks, KV heads,
            2, block size, head dim]; a segment of a state tensor is [layers, slots, units, width, ...].
        spec: of this rank's part of the model; its states are the tensors of a durable slot, perhaps encoded.
    """

    def __init__(self, engine: DynamicInferenceEngine, call: str) -> None:
        """ValueError or RuntimeError as in `export_prefixes`; they name the public function `call`."""
        instance("engine", engine, DynamicInferenceEngine)
        engine.ensure_allocated(call)
        context = engine.context
        if context.batch:
            raise RuntimeError(f"{call} is called during a step; end or abort it first")
        if not engine.config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False; accepted: an engine that caches prefixes")
        self.engine = engine
        self.kv_blocks, self.slots = context.prefix_cache.kv_blocks, context.prefix_cache.slots
        self.pools = _pools(context.memory.kv_cache, context.memory.durable_pool)
        self.spec = replace(context.spec, states=context.memory.durable_pool.states)
        self.block_size_tokens = engine.config.block_size_tokens
        self.rank = self.spec.groups.rank

    def format(self) -> PrefixFormat:
        """As `PrefixFormat.of`."""
        return PrefixFormat.of(self.spec, self.block_size_tokens, self.engine.weights_version)

    def attempt[T](self, work: Callable[[Notes], T], same: Sequence[str] = ()) -> Attempt[T]:
        """As `all_ranks.attempt`, on all ranks of the replica."""
        return attempt(self.spec.groups, self.spec.device, work, same)

    def state_slots(self) -> dict[int, int]:
        """Block -> slot of each state that a prompt can find, the most recently used first."""
        states = self.slots.cached_states
        # Not a slot that a host has allocated and not registered: it has an earlier state's bytes until then.
        findable = set(states.state_block_of_hash.values())
        by_recency = [(states.block_of(slot), slot) for slot in reversed(states.by_recency())]
        return {block: slot for block, slot in by_recency if block in findable}


def _pools(kv_cache: Tensor, state_pool: StatePool) -> dict[str, Tensor]:
    pools = {KV: kv_cache.permute(0, 2, 4, 1, 3, 5)}
    for tensor in state_pool.states:
        segments, durable = segments_of(tensor), state_pool.durable(tensor.name)
        entries = durable if tensor.shape else durable[..., None]
        parts = torch.split(entries, [segment.size for segment in segments.values()], dim=2)
        for (name, segment), part in zip(segments.items(), parts, strict=True):
            pools[name] = torch.unflatten(part, 2, (segment.part.count, segment.width))
    return pools


def export_prefixes(
    engine: DynamicInferenceEngine, prefixes: Iterable[PrefixName] | None = None
) -> PrefixShard:
    """Copy cached prefixes, KV blocks and states, to the CPU; between steps, the cache stays as it is.

    Synchronises with the device. Every rank of a replica that passes the same prefixes returns the same
    forest.

    Args:
        engine: the engine to export from.
        prefixes: the prefixes to export, each as (tokens, salt), or as the hash of a block that has a state
            (a hash that is not cached names nothing); None for all that are cached. Of each prefix the
            export holds every cached state, and the blocks down to the deepest one. Blocks below the deepest
            state are left out. A block that several prefixes share is exported once.

    Returns:
        This rank's part.

    Raises:
        ValueError: a bad argument; an engine without prefix caching or without a `weights_version` of type
            str, int or bytes; or a model that does not say which part of it this rank holds.
        RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
    """
    access = CacheAccess(engine, "export_prefixes")
    form, state_slots = access.format(), chosen_states(access, prefixes)
    blocks, forest = forest_of(access, list(state_slots))
    slots = list(state_slots.values())
    tensors = {name: _read(pool, blocks if name == KV else slots) for name, pool in access.pools.items()}
    return PrefixShard(form, forest, shard_of(access.spec), tensors)


def _read(pool: Tensor, entries: Sequence[int]) -> Tensor:
    """Copy these entries (blocks or slots) of a pool to a new tensor on the CPU; synchronises."""
    values = torch.empty((len(pool), len(entries), *pool.shape[2:]), dtype=pool.dtype, device="cpu")
    for first, some in entries_at_once(pool, entries):
        # `index_select` takes several times as long on a CPU where entries are not contiguous.
        values[:, first : first + len(some)] = torch.stack([pool[:, entry] for entry in some], 1)
    return values


def entries_at_once(pool: Tensor, entries: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """(Position in `entries`, the entries from there on that fit `STAGING_BYTES`)."""
    count = max(1, STAGING_BYTES // max(1, pool[:, :1].nbytes))
    for first in range(0, len(entries), count):
        yield first, entries[first : first + count]


def chosen_states(
    access: CacheAccess, prefixes: Iterable[PrefixName] | None, deepest: bool = False
) -> dict[int, int]:
    """Block -> slot of all states of `prefixes`, or the deepest of each; the most recently used first."""
    state_slots = access.state_slots()
    if prefixes is None:
        return state_slots
    if not isinstance(prefixes, Iterable):
        raise refused("prefixes", prefixes, "a list of (tokens, salt), or None")
    chosen: set[int] = set()
    for index, prefix in enumerate(prefixes):
        blocks = [block for block in _path_of(access, index, prefix) if block in state_slots]
        chosen.update(blocks[-1:] if deepest else blocks)
    return {block: slot for block, slot in state_slots.items() if block in chosen}


def _path_of(access: CacheAccess, index: int, prefix: PrefixName) -> list[int]:
    """The cached blocks of a prefix, from its first one on; [] for a hash without a state."""
    if isinstance(prefix, int) and not isinstance(prefix, bool):
        path: list[int] = []
        block: int | bytes | None = access.slots.cached_states.state_block_of_hash.get(prefix)
        while isinstance(block, int):
            path.append(block)
            block, _ = access.kv_blocks.tree.content_of(block)
        return path[::-1]
    if not isinstance(prefix, tuple) or len(prefix) != 2:
        raise refused(f"prefixes[{index}]", prefix, "(tokens, salt), or a hash")
    tokens, salt = prefix
    root = access.engine.salt_key.root(salt_bytes(f"prefixes[{index}][1]", salt))
    chain = PrefixHashChain(access.block_size_tokens, root)
    chain.extend_to(integers(f"prefixes[{index}][0]", tokens, 0, access.spec.vocab_size - 1))
    return list(access.kv_blocks.tree.match(chain.root, chain.hashes, chain.tokens))


def recent_states(engine: DynamicInferenceEngine) -> list[int]:
    """The hashes of the states that a prompt can find, the most recently used first; alike on all ranks."""
    access = CacheAccess(engine, "recent_states")
    return list(map(access.slots.cached_states.hash_of, access.state_slots().values()))


def forest_of(access: CacheAccess, state_blocks: Sequence[int]) -> tuple[list[int], PrefixForest]:
    """The block of each node, and the forest of all paths down to `state_blocks`."""
    node_of: dict[int, int] = {}
    roots: dict[bytes, int] = {}
    parents: list[int] = []
    tokens: list[bytes] = []
    for state_block in state_blocks:
        path: list[tuple[int, int | bytes, bytes]] = []
        block: int | bytes = state_block
        while isinstance(block, int) and block not in node_of:
            parent, content = access.kv_blocks.tree.content_of(block)
            path.append((block, parent, content))
            block = parent
        for block, parent, content in reversed(path):
            if isinstance(parent, bytes):
                parents.append(-1 - roots.setdefault(parent, len(roots)))
            else:
                parents.append(node_of[parent])
            node_of[block] = len(tokens)
            tokens.append(content)
    forest = PrefixForest(
        roots=tuple(roots), salt_key_id=access.engine.salt_key.key_id if roots.keys() - {PUBLIC_ROOT} else "",
        parents=tuple(parents), tokens=tuple(tokens), states=tuple(node_of[block] for block in state_blocks),
    )  # fmt: skip
    return list(node_of), forest
