"""What a prefix cache holds, against the recurrence: every findable state and every block of KV."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mambaslots as ms
import numpy as np
import torch
from mambaslots.inference.contexts.cache.block_tree import BlockTree
from oracle.serving import kept_oracle, small_model
from oracle.toy_answers import Sequence as ToySequence
from oracle.toy_lm import DIM, ToyLM, weights_of

TOLERANCE = 1e-9


class Found(NamedTuple):
    """How many states and blocks were compared."""

    states: int
    blocks: int


class Snapshot(NamedTuple):
    """One sequence behind tokens: states by name, [layers, ...]; keys and values, [layers, tokens, ...]."""

    states: dict[str, np.ndarray[Any, Any]]
    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def assert_cache_is_right(engine: ms.DynamicInferenceEngine, tolerance: float = TOLERANCE) -> Found:
    """Hold all tensors of each findable state, and each block's keys and values, to the recurrence.

    The tokens of a prefix are those that the KV index has for it. `tolerance`: of states.
    """
    context, size = engine.context, engine.config.block_size_tokens
    tree, slots = context.prefix_cache.kv_blocks.tree, context.prefix_cache.slots
    pool, kv = context.memory.durable_pool, context.memory.kv_cache
    states = 0
    for block in slots.cached_states.state_block_of_hash.values():
        tokens = tokens_to(tree, block)
        slot = pool.durable_index(slots.cached_states.slot_of(block))
        for name, wanted in snapshot(engine.model, tokens).states.items():
            _assert_close(pool[name][:, slot], wanted, tolerance, f"{name} behind {len(tokens)} tokens")
        states += 1
    blocks = 0
    for block in tree.block_of_hash.values():
        tokens = tokens_to(tree, block)
        known = snapshot(engine.model, tokens)
        for number, wanted in enumerate((known.keys, known.values)):
            found = kv[:, number, block].reshape(wanted[:, -size:].shape)
            _assert_close(found, wanted[:, -size:], TOLERANCE, f"KV behind {len(tokens)} tokens")
        blocks += 1
    return Found(states, blocks)


def _assert_close(found: torch.Tensor, wanted: Any, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(
        found.detach().cpu().double().numpy(), wanted, rtol=0, atol=tolerance, err_msg=what
    )


def tokens_to(tree: BlockTree, block: int) -> tuple[int, ...]:
    """The tokens of a registered prefix, up to the end of `block`."""
    parts = []
    before: int | bytes = block
    while isinstance(before, int):
        before, content = tree.content_of(before)
        parts.append(np.frombuffer(content, "<u4").tolist())
    return tuple(token for part in reversed(parts) for token in part)


def snapshot(model: Any, tokens: Sequence[int]) -> Snapshot:
    """The recurrence of an engine's model behind `tokens`; of `small_model` where that is wrapped."""
    if isinstance(model, ToyLM):
        return _toy_snapshot(model.version, model.kind, tuple(tokens))
    return _snapshot(model if isinstance(model, ms.models.HybridLM) else small_model(), tuple(tokens))


@cache
def _snapshot(model: ms.models.HybridLM, tokens: tuple[int, ...]) -> Snapshot:
    lm = kept_oracle(model)
    states = {name: tensor.numpy() for name, tensor in lm.states_after(tokens).items()}
    shape = len(lm.keys), len(tokens), lm.config.num_kv_heads, lm.config.head_dim
    return Snapshot(states, np.reshape(lm.keys, shape), np.reshape(lm.values, shape))


@cache
def _toy_snapshot(version: int, kind: Any, tokens: tuple[int, ...]) -> Snapshot:
    lm = ToySequence(weights_of(version), kind)
    for token in tokens:
        lm.step(token)
    states = {"window": np.stack(lm._window)[None]}
    states |= {f"sum_{number}": np.asarray(values)[None] for number, values in enumerate(lm._sums)}
    shape = int(kind.attention), len(tokens), DIM
    return Snapshot(states, np.reshape(lm._keys, shape), np.reshape(lm._values, shape))
