"""Every cached state against the recurrence over exactly the tokens of the prefix that finds it."""

from functools import cache
from typing import Any

import numpy as np
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from oracle.serving import kept_oracle, small_model
from torch import Tensor


def cached_prefixes(context: DynamicInferenceContext) -> dict[int, tuple[int, ...]]:
    """Committed slot -> the tokens of the prefix under whose hash the slot is found."""
    tree, states = context.prefix_cache.tree, context.prefix_cache.cached_states
    return {states.slot_of(block): _tokens_to(tree, block) for block in states.state_block_of_hash.values()}


def _tokens_to(tree: Any, block: int | bytes) -> tuple[int, ...]:
    tokens: list[int] = []
    while isinstance(block, int):
        block, content = tree.content_of(block)
        tokens[:0] = np.frombuffer(content, dtype="<u4").tolist()
    return tuple(tokens)


def stored_state(context: DynamicInferenceContext, slot: int) -> dict[str, Tensor]:
    """All tensors of a durable slot, [layers, ...], where durable slots hold states as they are live."""
    pool = context.memory.durable_pool
    return {tensor.name: pool[tensor.name][:, pool.durable_index(slot)] for tensor in pool.states}


@cache
def _states_after(model: Any, tokens: tuple[int, ...]) -> dict[str, Tensor]:
    states: dict[str, Tensor] = kept_oracle(model).states_after(tokens)
    return states


def assert_cached_states(
    context: DynamicInferenceContext, model: Any = None, atol: float = 1e-9, rtol: float = 0.0
) -> int:
    """Every findable state is the recurrence's after its prefix, in every tensor; how many there are.

    `model`: whose weights the recurrence has; None for `small_model()`.
    """
    model = small_model() if model is None else model
    prefixes = cached_prefixes(context)
    for slot, tokens in prefixes.items():
        expected = _states_after(model, tokens)
        stored = stored_state(context, slot)
        assert stored.keys() == expected.keys()
        for name, states in expected.items():
            found, error = stored[name].double().cpu(), f"{name} after {len(tokens)} tokens: {{}}".format
            torch.testing.assert_close(found, states, rtol=rtol, atol=atol, msg=error)
    return len(prefixes)
