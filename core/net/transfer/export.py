"""Out of the pools: an engine's cached prefixes as one rank's part of an export."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ...inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain, salt_bytes
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import integers, shown
from .cache_access import CacheAccess
from .forest import PrefixForest
from .format import PrefixFormat
from .parts import KV, shard_of
from .placement import read_rows
from .shard import PrefixShard

PrefixName = tuple[Sequence[int] | Tensor, bytes | str | None] | int
"""The tokens of a prefix, and the salt under which the prefix is cached; or the hash of its last block, which
has a state. The hash says nothing about the salt."""


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
    return export_from(CacheAccess.of(engine, "export_prefixes"), prefixes)


def export_from(access: CacheAccess, prefixes: Iterable[PrefixName] | None) -> PrefixShard:
    """`export_prefixes` of a cache that is open already."""
    form = PrefixFormat.of(access)
    shard = shard_of(access.spec)
    state_slots = chosen_states(access, prefixes, "all")
    blocks, forest = forest_of(access, list(state_slots))
    slots = list(state_slots.values())
    return PrefixShard(
        format=form,
        forest=forest,
        shard=shard,
        split=(access.parallel.tensor_size, access.parallel.pipeline_size),
        tensors={
            name: read_rows(pool, 1, blocks if name == KV else slots) for name, pool in access.pools.items()
        },
    )


def chosen_states(access: CacheAccess, prefixes: Iterable[PrefixName] | None, states: str) -> dict[int, int]:
    """Block -> slot of the states to export, the most recently used first.

    Args:
        access: the cache.
        prefixes: as in `export_prefixes`; None for every state.
        states: of each of `prefixes`, "all" states or the "deepest" one.
    """
    state_slots = access.state_slots()
    if prefixes is None:
        return state_slots
    chosen: set[int] = set()
    for path in _paths_of(access, prefixes):
        found = [block for block in path if block in state_slots]
        chosen.update(found if states == "all" else found[-1:])
    return {block: slot for block, slot in state_slots.items() if block in chosen}


def _paths_of(access: CacheAccess, prefixes: Iterable[PrefixName]) -> list[list[int]]:
    """The cached blocks of each of these prefixes, from its first one on."""
    if not isinstance(prefixes, Iterable):
        raise ValueError(f"prefixes is {shown(prefixes)}; accepted: a list of (tokens, salt), or None")
    paths: list[list[int]] = []
    for index, prefix in enumerate(prefixes):
        if isinstance(prefix, int) and not isinstance(prefix, bool):
            paths.append(_path_to(access, prefix))
            continue
        if not isinstance(prefix, tuple) or len(prefix) != 2:
            raise ValueError(f"prefixes[{index}] is {shown(prefix)}; accepted: (tokens, salt), or a hash")
        tokens, salt = prefix
        root = access.salt_key.root(salt_bytes(f"prefixes[{index}][1]", salt))
        chain = PrefixHashChain(access.block_size_tokens, root)
        chain.extend_to(integers(f"prefixes[{index}][0]", tokens, 0, access.spec.vocab_size - 1))
        paths.append(list(access.kv_blocks.tree.match(chain.root, chain.keys, chain.tokens)))
    return paths


def _path_to(access: CacheAccess, key: int) -> list[int]:
    """The blocks of a prefix, from its first one to the one whose state has this hash; [] without a state."""
    path: list[int] = []
    block: int | bytes | None = access.slots.tree.hash_to_block_id.get(key)
    while isinstance(block, int):
        path.append(block)
        block, _ = access.kv_blocks.tree.content_of(block)
    return path[::-1]


def recent_states(engine: DynamicInferenceEngine) -> list[int]:
    """The hashes of the states that a prompt can find, the most recently used first.

    Args:
        engine: of this rank; nothing changes. All ranks of a split model return the same.

    Raises:
        ValueError, RuntimeError: as in `export_prefixes`.
    """
    access = CacheAccess.of(engine, "recent_states")
    return [access.slots.tree.key_of(block) for block in access.state_slots()]


def forest_of(access: CacheAccess, state_blocks: Sequence[int]) -> tuple[list[int], PrefixForest]:
    """The block of each node, and the forest of all paths down to `state_blocks`."""
    node_of: dict[int, int] = {}
    roots: dict[bytes, int] = {}
    parents: list[int] = []
    tokens: list[bytes] = []
    for state_block in state_blocks:
        path, block = [], state_block
        while block not in node_of:
            parent, content = access.kv_blocks.tree.content_of(block)
            path.append((block, parent, content))
            if isinstance(parent, bytes):
                break
            block = parent
        for block, parent, content in reversed(path):
            if isinstance(parent, bytes):
                parents.append(-1 - roots.setdefault(parent, len(roots)))
            else:
                parents.append(node_of[parent])
            node_of[block] = len(tokens)
            tokens.append(content)
    forest = PrefixForest(
        block_size_tokens=access.block_size_tokens,
        roots=tuple(roots),
        salt_key_id=access.salt_key.key_id if roots.keys() - {PUBLIC_ROOT} else "",
        parents=tuple(parents),
        tokens=tuple(tokens),
        states=tuple(node_of[block] for block in state_blocks),
    )
    return list(node_of), forest
