"""Out of the pools: the prefixes of an engine's cache as one rank's part of an export."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..inference.contexts.dynamic_context import DynamicInferenceContext
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.policies.prefix_hash import PrefixHashChain
from ..validation import instance, integers, shown
from .prefix_forest import PrefixForest
from .prefix_format import PrefixFormat, shard_of
from .prefix_shard import PrefixShard

PrefixName = tuple[Sequence[int] | Tensor, bytes | str | None]
"""The tokens of a prefix, and the salt it is cached under."""

STAGING_BYTES = 256 << 20
"""Most bytes of a pool that are copied at once: what the copy takes beside its two sides."""


def export_prefixes(
    engine: DynamicInferenceEngine, prefixes: Iterable[PrefixName] | None = None
) -> PrefixShard:
    """This rank's part of the prefixes in an engine's cache: KV blocks, and states where there are some.

    `prefixes`: which, each with all its states up to the deepest cached one, None for all that are cached;
    what has no cached state is left out, what prefixes share comes once. Between steps; changes nothing, and
    synchronises: tensors are copied to the CPU. Every rank of a replica that is asked for the same returns
    the same forest. ValueError where the engine has no `weights_version` that is a str, int or bytes, no
    prefix caching, or a model that does not say which part of it a rank holds.
    """
    slots = checked_slots(engine, "export_prefixes")
    form = PrefixFormat.of(engine)
    context, groups = engine.context, engine.context.spec.groups
    blocks, states, forest = _forest(context, slots, _state_blocks(context, slots, prefixes))
    ssm = read_rows(slots.ssm_states, 1, states)
    conv = read_rows(slots.conv_states, 1, states)
    kv = read_rows(context.kv_cache, 2, blocks)
    shard = shard_of(engine)
    heads, groups_here = shard.mamba_heads.count, shard.mamba_groups.count
    x, B, C = torch.split(
        conv, [heads * form.mamba_head_dim, *2 * [groups_here * form.mamba_state_dim]], dim=2
    )
    return PrefixShard(
        format=form,
        forest=forest,
        shard=shard,
        split=(groups.tensor_size, groups.pipeline_size),
        tensors={
            "ssm": ssm,
            "conv_x": torch.unflatten(x, 2, (heads, form.mamba_head_dim)),
            "conv_B": torch.unflatten(B, 2, (groups_here, form.mamba_state_dim)),
            "conv_C": torch.unflatten(C, 2, (groups_here, form.mamba_state_dim)),
            "kv": kv,
        },
    )


def checked_slots(engine: DynamicInferenceEngine, call: str) -> MambaSlotAllocator:
    """The durable slots of an engine whose cache can be read and written now."""
    instance("engine", engine, DynamicInferenceEngine)
    engine.check_usable(call)
    if engine.context.suspended:
        raise RuntimeError(f"{call} is called on a suspended engine; resume it first")
    if engine.context.step_chunks:
        raise RuntimeError(f"{call} is called during a step; end or abort it first")
    slots = engine.context.mamba_slot_allocator
    if slots is None:
        raise ValueError("enable_prefix_caching is False; accepted: an engine that caches prefixes")
    return slots


def read_rows(pool: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """`pool`'s rows along `dim`, in this order, on the CPU, in as few copies as `STAGING_BYTES` allows."""
    shape = list(pool.shape)
    shape[dim] = len(rows)
    values = torch.empty(shape, dtype=pool.dtype)
    for first, index in _staged(pool, dim, rows):
        values.narrow(dim, first, len(index)).copy_(pool.index_select(dim, index))
    return values


def write_rows(pool: Tensor, dim: int, rows: Sequence[int], values: Tensor, chosen: Sequence[int]) -> None:
    """The converse, from the CPU: the `chosen` rows of `values` become `pool`'s distinct `rows`."""
    for first, index in _staged(pool, dim, rows):
        part = torch.tensor(chosen[first : first + len(index)], dtype=torch.int64)
        pool.index_copy_(dim, index, values.index_select(dim, part).to(pool.device))


def _staged(pool: Tensor, dim: int, rows: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
    row_bytes = max(1, pool[(slice(None),) * dim + (slice(0, 1),)].numel() * pool.element_size())
    at_once = max(1, STAGING_BYTES // row_bytes)
    for first in range(0, len(rows), at_once):
        yield first, torch.tensor(rows[first : first + at_once], dtype=torch.int64, device=pool.device)


def _state_blocks(
    context: DynamicInferenceContext, slots: MambaSlotAllocator, prefixes: Iterable[PrefixName] | None
) -> list[int]:
    """The blocks whose states are exported, most recently used first.

    Not those of slots that a host has but allocated: they hold old bytes until their hash is registered.
    """
    block_of, findable = slots.slot_to_block.tolist(), set(slots.hash_to_block_id.values())
    blocks = [block_of[slot] for slot in reversed(slots.slots_by_use)]
    blocks = [block for block in blocks if block in findable]
    if prefixes is None:
        return blocks
    if not isinstance(prefixes, Iterable):
        raise ValueError(f"prefixes is {shown(prefixes)}; accepted: a list of (tokens, salt), or None")
    wanted: set[int] = set()
    for index, prefix in enumerate(prefixes):
        if not isinstance(prefix, tuple) or len(prefix) != 2:
            raise ValueError(f"prefixes[{index}] is {shown(prefix)}; accepted: (tokens, salt)")
        tokens, salt = prefix
        chain = PrefixHashChain(context.block_size_tokens, _salt_bytes(f"prefixes[{index}][1]", salt))
        chain.extend_to(integers(f"prefixes[{index}][0]", tokens, 0, context.spec.vocab_size - 1))
        wanted.update(context.kv_block_allocator.match_chain(chain.salt, chain.keys, chain.tokens))
    return [block for block in blocks if block in wanted]


def _salt_bytes(name: str, salt: object) -> bytes:
    if salt is None or isinstance(salt, bytes):
        return salt or b""
    if not isinstance(salt, str):
        raise ValueError(f"{name} is {shown(salt)}; accepted: bytes, a str or None")
    try:
        return salt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {shown(salt)}; accepted: a str that UTF-8 can encode") from error


def _forest(
    context: DynamicInferenceContext, slots: MambaSlotAllocator, state_blocks: Sequence[int]
) -> tuple[list[int], list[int], PrefixForest]:
    """The blocks of the forest's nodes, the slots of its states, and the forest."""
    kv = context.kv_block_allocator
    node_of: dict[int, int] = {}
    salts: dict[bytes, int] = {}
    parents: list[int] = []
    tokens: list[bytes] = []
    for state_block in state_blocks:
        path, block = [], state_block
        while block not in node_of:
            before, content = kv.content_of(block)
            path.append((block, before, content))
            if isinstance(before, bytes):
                break
            block = before
        for block, before, content in reversed(path):
            if isinstance(before, bytes):
                parents.append(-1 - salts.setdefault(before, len(salts)))
            else:
                parents.append(node_of[before])
            node_of[block] = len(tokens)
            tokens.append(content)
    forest = PrefixForest(
        block_size_tokens=context.block_size_tokens,
        salts=tuple(salts),
        parents=tuple(parents),
        tokens=tuple(tokens),
        states=tuple(node_of[block] for block in state_blocks),
    )
    return list(node_of), [slots.get_slot(block) for block in state_blocks], forest
