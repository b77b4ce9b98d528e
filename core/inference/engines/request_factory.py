"""What callers of an engine pass, checked."""

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel_groups import ParallelGroups
from ...params_and_results import SamplingParams
from ...validation import as_list, instance, integer, integers, refused, shown
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.cache.hashing import PrefixHashChain, SaltKey, given_key, salt_bytes
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.dynamic_request import NO_ID, DynamicInferenceRequest
from .drafter import Drafter, NgramDrafter

Prompt = Sequence[int] | Tensor
Salt = bytes | str | None


class RequestFactory:
    """Makes the requests of an engine from what its callers pass, which is checked here alone."""

    def __init__(self, context: DynamicInferenceContext, salt_key: SaltKey, seed: int) -> None:
        # Of the next request of a user (0, 1, ..), and of the next one of `warm` or `score` (-2, -3, ..).
        # Seeds are made of ids: `warm` and `score` change no seed of a user's request.
        self.next_ids = 0, NO_ID - 1
        self._context, self._config = context, context.config
        self._salt_key, self._seed = salt_key, seed

    def new_request(
        self,
        name: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        cache_salt: Salt,
        checkpoint_plan: CheckpointPlan | None,
    ) -> DynamicInferenceRequest:
        """A request without an id and a seed; a ValueError that names the prompt where it can never run."""
        vocab_size = self._context.spec.vocab_size
        tokens = checked_prompt(name, prompt, vocab_size)
        if not tokens:
            raise ValueError(f"{name} is empty; accepted: at least one token")
        sampling = SamplingParams() if sampling_params is None else sampling_params
        instance("sampling_params", sampling, SamplingParams)
        integers("stop_token_ids", sampling.stop_token_ids, 0, vocab_size - 1)
        if sampling.logit_bias:
            integers("logit_bias", [token for token, _ in sampling.biases], 0, vocab_size - 1)
        if sampling.min_tokens and len({*sampling.stops}) == vocab_size:
            raise ValueError(
                f"min_tokens is {sampling.min_tokens} and every token is a stop token; accepted: fewer"
            )
        integer("num_top_log_probs", sampling.num_top_log_probs, 0, vocab_size)
        if sampling.num_given_tokens:
            _check_given(tokens, sampling)
        num_prompt_tokens, most = len(tokens) - sampling.num_given_tokens, sampling.max_tokens
        text = f"prompt and answer have {num_prompt_tokens} + {most} tokens; accepted: together at most"
        self._check_length(text, num_prompt_tokens + most)
        return self._make_request(tokens, num_prompt_tokens, sampling, cache_salt, checkpoint_plan)

    def new_sequence(
        self, name: str, sequence: Prompt, start: int, cache_salt: Salt, plan: CheckpointPlan | None
    ) -> DynamicInferenceRequest:
        """A sequence to score, from token `start` on, as a request that ends with its prompt."""
        tokens = checked_prompt(name, sequence, self._context.spec.vocab_size)
        if len(tokens) < 2:
            raise ValueError(
                f"{name} has {len(tokens)} tokens; accepted: at least 2, a context and one to score"
            )
        self._check_length(f"{name} has {len(tokens)} tokens; accepted: at most", len(tokens))
        start = integer(f"start of {name}", start, 1, len(tokens) - 1)
        if plan is None:  # other sequences may share the context
            plan = self._config.checkpoint_plan.with_marks([start - 1])
        sampling = SamplingParams(max_tokens=1, skip_prompt_log_probs=False, prompt_log_probs_start=start)
        request = self._make_request(tokens[:-1], len(tokens) - 1, sampling, cache_salt, plan)
        request.next_token = tokens[-1]
        return request

    def hashed_prefix(self, tokens: Prompt, cache_salt: Salt) -> tuple[list[int], PrefixHashChain]:
        """The tokens of a prefix, perhaps none, and their hashes."""
        prefix = checked_prompt("tokens", tokens, self._context.spec.vocab_size)
        chain = self._chain(cache_salt)
        chain.extend_to(prefix)
        return prefix, chain

    def assign_id(self, request: DynamicInferenceRequest, *, is_users: bool, owned: bool) -> None:
        """Give a request its id and seed. `owned`: the engine keeps no result of it for `take_result`."""
        users, other = self.next_ids
        self.next_ids = (users + 1, other) if is_users else (users, other - 1)
        request.request_id, request.owned = users if is_users else other, owned
        request.seed = request_seed(request.sampling, self._seed, request.request_id)
        request.arrival_s = time.perf_counter()
        if self._config.enable_prefix_caching:
            request.chain.extend_to(request.tokens)  # here, so that a crowd of new requests delays no step

    def skip_ids(self) -> None:
        """Let ranks whose engines failed at different requests go on with equal ids."""
        users, other = self.next_ids
        self.next_ids = ((users >> 32) + 1) << 32, other

    def _make_request(
        self,
        tokens: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        cache_salt: Salt,
        plan: CheckpointPlan | None,
    ) -> DynamicInferenceRequest:
        if plan is None:
            plan = self._config.checkpoint_plan
        elif plan is not self._config.checkpoint_plan:
            instance("checkpoint_plan", plan, CheckpointPlan).check_block_size(self._config.block_size_tokens)
        return DynamicInferenceRequest(
            request_id=NO_ID, prompt_tokens=tokens[:num_prompt_tokens], sampling=sampling, plan=plan,
            chain=self._chain(cache_salt), arrival_s=0.0, given_tokens=tokens[num_prompt_tokens:],
        )  # fmt: skip

    def _chain(self, cache_salt: Salt) -> PrefixHashChain:
        root = self._salt_key.root(salt_bytes("cache_salt", cache_salt))
        return PrefixHashChain(self._config.block_size_tokens, root)

    def _check_length(self, text: str, num_tokens: int) -> None:
        longest, pool_tokens = self._config.max_sequence_length, self._context.pool_tokens
        if num_tokens > min(longest, pool_tokens):
            raise ValueError(f"{text} max_sequence_length ({longest}) and the KV pool ({pool_tokens})")


def _check_given(tokens: list[int], sampling: SamplingParams) -> None:
    """Raise a ValueError where an answer cannot begin with the last `num_given_tokens` of `tokens`."""
    given = sampling.num_given_tokens
    if given >= len(tokens):
        raise ValueError(
            f"num_given_tokens is {given} and the prompt has {len(tokens)} tokens; accepted: at least one "
            "token before the given ones"
        )
    if tokens[-1] in sampling.stops:
        raise ValueError("the last given token ends the answer; accepted: a token that does not")


def request_seed(sampling: SamplingParams, engine_seed: int, request_id: int) -> int:
    """The seed of a request's random numbers: the request's own, or one made of the other two arguments."""
    if sampling.seed is not None:
        return sampling.seed
    digest = hashlib.sha256(f"request {request_id} of engine {engine_seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def prompts_with(noun: str, prompts: Iterable[Prompt], **values: Any) -> list[tuple[Any, ...]]:
    """Each prompt with its entry of each of `values`. `noun`: what messages call a prompt.

    A list or tuple in `values` has one entry for each prompt; another value is that of all prompts.
    """
    listed = as_list(prompts)
    if listed is None or (listed and all(map(_is_number, listed))):
        found = shown(prompts) if listed is None else f"a list of {len(listed)} token ids"
        raise ValueError(
            f"{noun}s is {found}; accepted: a list of {noun}s, each a list of token ids: tokenize text "
            f"first, and pass [{noun}] for one"
        )
    columns = [listed]
    for name, value in values.items():
        column = value if isinstance(value, (list, tuple)) else [value] * len(listed)
        if len(column) != len(listed):
            raise ValueError(
                f"{name} has {len(column)} entries; accepted: one for all, or {len(listed)}, one a {noun}"
            )
        columns.append(list(column))
    return list(zip(*columns, strict=True))


def _is_number(value: object) -> bool:
    """Whether `value` is an int, or one of numpy's or torch's."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not getattr(value, "shape", ()))


def checked_prompt(name: str, prompt: Prompt, vocab_size: int) -> list[int]:
    """`prompt` as a list of token ids within the vocabulary, perhaps empty; else a ValueError."""
    if isinstance(prompt, (str, bytes)):
        raise refused(name, prompt, "a list of token ids: tokenize text first")
    return integers(name, prompt, 0, vocab_size - 1)


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


def agreed_salt_key(
    setting: bytes | str | None, groups: ParallelGroups, device: torch.device | None = None
) -> SaltKey:
    """The salt key of the configuration, the environment or a draw, the same on every rank: a collective."""
    key, refusal = None, ""
    try:
        key = given_key(setting, os.environ)
    except ValueError as error:
        refusal = str(error)
    groups.raise_first(refusal, device)
    key_ids = groups.gather(None if key is None else SaltKey(key).key_id, device)
    if len(set(key_ids)) > 1:
        raise ValueError(
            f"salt_key has the key ids {key_ids} on the model's ranks; accepted: one key on all ranks, or "
            "none on any"
        )
    return SaltKey(groups.gather(secrets.token_bytes(32), device)[0] if key is None else key)
