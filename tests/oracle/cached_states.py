"""Every cached state against the recurrence over exactly the tokens of the prefix that finds it."""

from typing import Any

import numpy as np
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from oracle.recurrent_lm import RecurrentLM
from oracle.serving import small_model
from torch import Tensor


def cached_prefixes(context: DynamicInferenceContext) -> dict[int, tuple[int, ...]]:
    """Committed slot -> the tokens of the prefix under whose hash the slot is found."""
    tree = context.prefix_cache.tree
    return {tree.slot_of(block): _tokens_to(tree, block) for block in tree.state_block_of_key.values()}


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


_known: dict[tuple[Any, tuple[int, ...]], dict[str, Tensor]] = {}


def _states_after(model: Any, tokens: tuple[int, ...], block: int) -> dict[str, Tensor]:
    if (model, tokens) not in _known:
        lm = RecurrentLM(model)
        for position, token in enumerate(tokens, 1):
            lm.step(token)
            if position % block == 0:
                _known[model, tokens[:position]] = lm.states_now()
    return _known[model, tokens]


def assert_cached_states(
    context: DynamicInferenceContext, model: Any = None, atol: float = 1e-9, rtol: float = 0.0
) -> int:
    """Every findable state is the recurrence's after its prefix, in every tensor; how many there are.

    `model`: whose weights the recurrence has; None for `small_model()`.
    """
    model = small_model() if model is None else model
    prefixes = cached_prefixes(context)
    for slot, tokens in sorted(prefixes.items(), key=lambda entry: -len(entry[1])):
        expected = _states_after(model, tokens, context.config.block_size_tokens)
        stored = stored_state(context, slot)
        assert stored.keys() == expected.keys()
        for name, states in expected.items():
            found, error = stored[name].double().cpu(), f"{name} after {len(tokens)} tokens: {{}}".format
            torch.testing.assert_close(found, states, rtol=rtol, atol=atol, msg=error)
    return len(prefixes)
