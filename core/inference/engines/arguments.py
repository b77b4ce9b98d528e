"""What callers of an engine pass, checked."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...parallel_groups import ParallelGroups
from ...request import SamplingParams
from ...validation import instance, integer, integers, is_unordered, optional_integer, shown
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.cache.hashing import SaltKey, drawn_key, given_key, salt_bytes
from ..contexts.dynamic_context import DynamicInferenceContext
from .drafter import Drafter, NgramDrafter

Prompt = Sequence[int] | Tensor
Salt = bytes | str | None


class CheckedRequest(NamedTuple):
    """The arguments of a request that can run.

    Attributes:
        tokens: the prompt, then the answer's first `sampling.num_generated` tokens.
        next_token: the token after the prompt, of a request that scores.
    """

    tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan
    salt: bytes | None
    next_token: int | None = None


def checked_request(
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    cache_salt: Salt,
    checkpoint_plan: CheckpointPlan | None,
    context: DynamicInferenceContext,
    name: str = "prompt",
) -> CheckedRequest:
    """A request as the caller passed it, checked; a ValueError where it can never run."""
    tokens = checked_prompt(name, prompt, context.spec.vocab_size)
    if not tokens:
        raise ValueError(f"{name} is empty; accepted: at least one token")
    sampling = checked_sampling(sampling_params, context.spec.vocab_size)
    plan = checked_plan(checkpoint_plan, context.config)
    salt = salt_bytes("cache_salt", cache_salt)
    _check_given(tokens, sampling)
    num_prompt_tokens = len(tokens) - sampling.num_generated
    longest, pool_tokens = context.config.max_sequence_length, _pool_tokens(context)
    if num_prompt_tokens + sampling.num_tokens_to_generate > min(longest, pool_tokens):
        raise ValueError(
            f"prompt and answer have {num_prompt_tokens} + {sampling.num_tokens_to_generate} tokens; "
            f"accepted: together at most max_sequence_length ({longest}) and the KV pool ({pool_tokens})"
        )
    return CheckedRequest(tokens, sampling, plan, salt)


def checked_sequence(
    name: str,
    sequence: Prompt,
    start: int,
    cache_salt: Salt,
    plan: CheckpointPlan | None,
    context: DynamicInferenceContext,
) -> CheckedRequest:
    """A sequence to score, from token `start` on, as a request that ends with its prompt, checked."""
    tokens = checked_prompt(name, sequence, context.spec.vocab_size)
    if len(tokens) < 2:
        raise ValueError(f"{name} has {len(tokens)} tokens; accepted: at least 2, a context and one to score")
    longest, pool_tokens = context.config.max_sequence_length, _pool_tokens(context)
    if len(tokens) > min(longest, pool_tokens):
        raise ValueError(
            f"{name} has {len(tokens)} tokens; accepted: at most max_sequence_length ({longest}) and the KV "
            f"pool ({pool_tokens})"
        )
    start = integer(f"start of {name}", start, 1, len(tokens) - 1)
    checked = checked_plan(plan, context.config)
    if plan is None:  # other sequences may share the context
        checked = replace(checked, marks=(*checked.marks, start - 1))
    sampling = SamplingParams(
        num_tokens_to_generate=1, skip_prompt_log_probs=False, prompt_log_probs_start=start
    )
    return CheckedRequest(tokens[:-1], sampling, checked, salt_bytes("cache_salt", cache_salt), tokens[-1])


def _pool_tokens(context: DynamicInferenceContext) -> int:
    return context.prefix_cache.kv_blocks.total_count * context.config.block_size_tokens


def named_prompts(prompts: Iterable[Prompt], name: str = "prompts") -> list[tuple[str, Any]]:
    """Each prompt with its name in messages, as "prompts[1]"; `name` is in the plural."""
    if isinstance(prompts, (str, bytes)):
        raise ValueError(
            f"{name} is {shown(prompts)}; accepted: a list of {name}, each a list of token ids: tokenize "
            "text first"
        )
    if getattr(prompts, "ndim", 0) == 1 and str(getattr(prompts, "dtype", "")) != "object":
        raise ValueError(
            f"{name} is a 1-D tensor or array; accepted: a list of {name}: pass [{name[:-1]}] for one"
        )
    try:
        listed = None if is_unordered(prompts) else list(prompts)
    except TypeError:
        listed = None
    if listed is None:
        raise ValueError(f"{name} is {shown(prompts)}; accepted: a list of {name}")
    if listed and all(map(_is_number, listed)):
        raise ValueError(
            f"{name} is a list of {len(listed)} token ids; accepted: a list of {name}: pass [{name[:-1]}] "
            "for one"
        )
    if len(listed) == 1:
        return [(name[:-1], listed[0])]
    return [(f"{name}[{index}]", prompt) for index, prompt in enumerate(listed)]


def _is_number(value: object) -> bool:
    """Whether `value` is an int, or one of numpy's or torch's."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not getattr(value, "shape", ()))


def checked_prompt(name: str, prompt: Prompt, vocab_size: int) -> list[int]:
    """`prompt` as a list of token ids within the vocabulary, perhaps empty; else a ValueError."""
    if isinstance(prompt, (str, bytes)):
        raise ValueError(f"{name} is {shown(prompt)}; accepted: a list of token ids: tokenize text first")
    return integers(name, prompt, 0, vocab_size - 1)


def _check_given(tokens: Sequence[int], sampling: SamplingParams) -> None:
    """Raise a ValueError where the answer's first tokens, which the prompt ends with, are a whole answer."""
    given = sampling.num_generated
    if given and given >= len(tokens):
        raise ValueError(
            f"num_generated is {given} and the prompt has {len(tokens)} tokens; accepted: at least one token "
            "before those that were generated"
        )
    if given and tokens[-1] in sampling.stops:
        raise ValueError("the last token that was generated ends the answer; accepted: a token that does not")


def checked_sampling(sampling_params: SamplingParams | None, vocab_size: int) -> SamplingParams:
    """The request's own settings, or the defaults; a ValueError where one lies beyond the vocabulary."""
    sampling = SamplingParams() if sampling_params is None else sampling_params
    instance("sampling_params", sampling, SamplingParams)
    optional_integer("termination_id", sampling.termination_id, -1, vocab_size - 1)
    integers("stop_token_ids", sampling.stop_token_ids, 0, vocab_size - 1)
    integer("num_top_log_probs", sampling.num_top_log_probs, 0, vocab_size)
    return sampling


def checked_plan(plan: CheckpointPlan | None, config: InferenceConfig) -> CheckpointPlan:
    """The request's own plan, or the configuration's."""
    if plan is None:
        return config.checkpoint_plan
    instance("checkpoint_plan", plan, CheckpointPlan)
    plan.check_block_size(config.block_size_tokens)
    return plan


def checked_drafter(drafter: Drafter | None, num_speculative_tokens: int) -> Drafter | None:
    """The drafter that an engine uses; None where it drafts nothing."""
    if drafter is None:
        return NgramDrafter() if num_speculative_tokens else None
    callable_draft = callable(getattr(drafter, "draft", None)) and not isinstance(drafter, type)
    if not num_speculative_tokens or not callable_draft:
        raise ValueError(
            f"drafter is {shown(drafter)} and num_speculative_tokens {num_speculative_tokens}; accepted: an "
            "object with `draft(tokens, max_drafts)`, where num_speculative_tokens is at least 1, or None"
        )
    return drafter


def one_each(name: str, value: Any, count: int, noun: str = "prompt") -> list[Any]:
    """`count` values: the entries of a list or tuple, or `value` repeated."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(
                f"{name} has {len(value)} entries; accepted: one for all, or {count}, one a {noun}"
            )
        return list(value)
    return [value] * count


def agreed_salt_key(
    setting: bytes | str | None, groups: ParallelGroups, device: torch.device | None = None
) -> SaltKey:
    """The salt key of the configuration, the environment or a draw, the same on every rank: a collective."""
    key, failure = None, ""
    try:
        key = given_key(setting, os.environ)
    except ValueError as error:
        failure = str(error)
    shared = (failure, None if key is None else SaltKey(key).key_id)
    of_ranks = groups.gather(shared, device) if groups.is_split else [shared]
    failures = [failure for failure, _ in of_ranks if failure]
    if failures:
        raise ValueError(failures[0])
    key_ids = [key_id for _, key_id in of_ranks]
    if len(set(key_ids)) > 1:
        raise ValueError(
            f"salt_key has the key ids {key_ids} on the model's ranks; accepted: one key on all ranks, or "
            "none on any"
        )
    if key is not None:
        return SaltKey(key)
    return SaltKey(groups.gather(drawn_key(), device)[0] if groups.is_split else drawn_key())
