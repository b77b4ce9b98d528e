"""Each public name of an engine is sorted: it changes what all ranks have, or it is this rank's alone."""

import inspect
from dataclasses import fields

import mambaslots as ms
import mambaslots.net as msd
from mambaslots.inference.contexts.request import DynamicInferenceRequest
from mambaslots.net.lockstep.followed_calls import FollowedCalls, asked_of
from mambaslots.net.lockstep.messages import call_message, read_call
from oracle.serving import small_engine

# What a public method tells the other ranks; those that make steps tell of each request and each step.
MADE_ON_ALL_RANKS = {
    "add_request": {"add"},
    "cancel": {"end"},
    "step": {"step"},
    "generate": {"add", "step", "end"},
    "score": {"add", "step", "end"},
    "stream": {"add", "step", "end"},
    "warm": {"add", "step", "end"},
    "pin": {"pin"},
    "unpin": {"unpin"},
    "reset_prefix_cache": {"reset_prefix_cache"},
    "set_weights_version": {"set_weights_version"},
    "suspend": {"suspend"},
    "resume": {"resume"},
    "reset": {"reset"},
}
# These end requests that nobody waits for, which all ranks are told of, and else read.
READS_AFTER_ENDS = {
    "has_unfinished_requests", "take_result", "pins", "stats", "check_integrity", "check_usable",
}  # fmt: skip
READS = {
    "computed_prefix", "num_unfinished_requests", "weights_version", "describe", "memory_summary",
    "has_one_caller", "limits", "observe", "unobserve",
}  # fmt: skip
# Refused outside `call_on_all`.
FOR_OTHERS = {"changing_cache"}
OF_LEADERS = {"call_on_all", "close"}


def public_names(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_public_name_of_an_engine_is_sorted() -> None:
    sorted_names = [*MADE_ON_ALL_RANKS, *READS_AFTER_ENDS, *READS, *FOR_OTHERS]
    assert len(sorted_names) == len(set(sorted_names))
    assert public_names(ms.DynamicInferenceEngine) == set(sorted_names)
    assert public_names(msd.LeadingEngine) == set(sorted_names) | OF_LEADERS


def test_every_call_that_is_told_is_one_that_followers_make() -> None:
    told = set().union(*MADE_ON_ALL_RANKS.values())
    assert public_names(FollowedCalls) == told | {"run", "close", "broken"}
    for name in told:
        assert read_call(call_message(name, (1, b"two"))) == (name, (1, b"two"))


def test_everything_that_a_request_was_asked_for_is_told() -> None:
    """A new field of a request is sorted here: other ranks are told of it, or it is of this rank."""
    told = {
        "request_id", "prompt_tokens", "sampling", "plan", "hashes", "seed", "next_token", "given_tokens",
    }  # fmt: skip
    of_this_rank = {
        "arrival_s", "owned", "tokens", "log_probs", "top_log_probs", "prompt_log_probs", "ttft_s", "holding",
        "ledger", "num_counted", "match", "result", "num_overtaken", "awaited_tokens", "awaits_states",
        "_token_view",
    }  # fmt: skip
    assert {field.name for field in fields(DynamicInferenceRequest)} == told | of_this_rank
    engine, other = (small_engine() for _ in range(2))
    calls = FollowedCalls(other)
    request_id = engine.add_request([1, 2, 3] * 9, ms.SamplingParams(seed=5), cache_salt=b"tenant")
    request = engine._state.requests[request_id]
    request.given_tokens = [4, 5]
    request.next_token = 6
    calls.add(*asked_of(request))
    copy = other._state.requests[request_id]
    for name in told - {"hashes"}:
        assert getattr(copy, name) == getattr(request, name), name
    assert copy.hashes.keys[:3] == request.hashes.keys[:3]
    assert copy.tokens == [*request.tokens, 4, 5]


def test_a_step_is_told_in_one_byte() -> None:
    assert len(call_message("step", ())) == 1
