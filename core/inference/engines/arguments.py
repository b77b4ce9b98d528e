"""What callers of an engine pass, checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ...config import InferenceConfig
from ...request import SamplingParams
from ...validation import instance, integer, integers, is_unordered, optional_integer, shown
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.cache.hashing import salt_bytes
from .drafter import Drafter, NgramDrafter

Prompt = Sequence[int] | Tensor
Salt = bytes | str | None


@dataclass(frozen=True)
class _NamedPrompt:
    """One of several prompts, with its name in messages."""

    name: str
    prompt: Prompt


def checked_prompts(prompts: Iterable[Prompt], name: str = "prompts") -> list[Any]:
    """`prompts` as a list of what `checked_prompt` takes; a ValueError says what else `prompts` is.

    The prompts themselves are not checked yet. `name`: what messages call them, in the plural.
    """
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
        return listed
    return [_NamedPrompt(f"{name}[{index}]", prompt) for index, prompt in enumerate(listed)]


def _is_number(value: object) -> bool:
    """Whether `value` is an int, or one of numpy's or torch's."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not getattr(value, "shape", ()))


def checked_prompt(name: str, prompt: Prompt | _NamedPrompt, vocab_size: int) -> list[int]:
    """`prompt` as a list of token ids within the vocabulary; else a ValueError.

    `name`: what messages call the prompt, unless it comes from a list of several prompts.
    """
    if isinstance(prompt, _NamedPrompt):
        tokens = checked_prompt(prompt.name, prompt.prompt, vocab_size)
        if not tokens:
            raise ValueError(f"{prompt.name} is empty; accepted: at least one token")
        return tokens
    if isinstance(prompt, (str, bytes)):
        raise ValueError(f"{name} is {shown(prompt)}; accepted: a list of token ids: tokenize text first")
    return integers(name, prompt, 0, vocab_size - 1)


def check_given(tokens: Sequence[int], sampling: SamplingParams) -> None:
    """Raise a ValueError where the answer's first tokens, which the prompt ends with, are a whole answer."""
    given = sampling.num_generated
    if given and given >= len(tokens):
        raise ValueError(
            f"num_generated is {given} and the prompt has {len(tokens)} tokens; accepted: at least one token "
            "before those that were generated"
        )
    if given and tokens[-1] in sampling.stops:
        raise ValueError("the last token that was generated ends the answer; accepted: a token that does not")


def check_length(
    num_prompt_tokens: int, sampling: SamplingParams, config: InferenceConfig, pool: int
) -> None:
    """Raise a ValueError for a request that can never run.

    Args:
        num_prompt_tokens: tokens of the prompt, without those of the answer.
        sampling: has the answer's length.
        config: the engine's.
        pool: how many tokens the whole KV pool holds.
    """
    if not num_prompt_tokens:
        raise ValueError("prompt is empty; accepted: at least one token")
    length = num_prompt_tokens + sampling.num_tokens_to_generate
    lengths = f"{num_prompt_tokens} + {sampling.num_tokens_to_generate}"
    if length > min(config.max_sequence_length, pool):
        raise ValueError(
            f"prompt and answer have {lengths} tokens; accepted: together at most max_sequence_length "
            f"({config.max_sequence_length}) and the KV pool ({pool})"
        )


class ScoredSequence(NamedTuple):
    """A sequence to score: tokens `start` and later ones, under the model's distribution."""

    tokens: list[int]
    start: int
    salt: bytes | None
    plan: CheckpointPlan


def checked_sequence(
    number: int,
    sequence: Prompt | _NamedPrompt,
    start: int,
    cache_salt: Salt,
    plan: CheckpointPlan | None,
    *,
    vocab_size: int,
    config: InferenceConfig,
    pool: int,
) -> ScoredSequence:
    """A sequence to score as the caller passed it, checked; a ValueError where it can never be scored.

    `number`: its place among the sequences, for messages. `pool`: how many tokens the whole KV pool holds.
    """
    name = f"sequences[{number}]"
    tokens = checked_prompt(name, sequence, vocab_size)
    if len(tokens) < 2:
        raise ValueError(f"{name} has {len(tokens)} tokens; accepted: at least 2, a context and one to score")
    longest = min(config.max_sequence_length, pool)
    if len(tokens) > longest:
        raise ValueError(
            f"{name} has {len(tokens)} tokens; accepted: at most max_sequence_length "
            f"({config.max_sequence_length}) and the KV pool ({pool})"
        )
    start = integer(f"start of {name}", start, 1, len(tokens) - 1)
    taken = checked_plan(plan, config)
    if plan is None:  # other sequences may share the context
        taken = replace(taken, marks=(*taken.marks, start - 1))
    return ScoredSequence(tokens, start, salt_bytes("cache_salt", cache_salt), taken)


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
