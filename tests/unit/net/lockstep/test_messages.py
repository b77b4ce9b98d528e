"""Each public name of an engine is sorted: it changes what all ranks have, or it is this rank's alone."""

import inspect
from dataclasses import fields
from typing import get_args

import mambaslots as ms
import mambaslots.net as msd
import msgspec
import pytest
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest
from mambaslots.inference.engines.engine_core import CoreCall
from mambaslots.net.lockstep.call_messages import (
    Add,
    Call,
    PlanFields,
    check_plain,
    message_of,
    name_of,
)
from oracle.serving import small_engine

# The calls that a public method sends to the other ranks; those that make steps send each request and step.
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
# These end abandoned requests, on all ranks, and else read.
READS_AFTER_ENDS = {
    "settle", "take_result", "pins", "stats", "check_integrity", "ensure_usable", "ensure_allocated",
}  # fmt: skip
READS = {
    "has_unfinished_requests", "computed_prefix", "weights_version", "describe",
    "has_one_caller", "observe", "unobserve",
}  # fmt: skip
# Refused outside `call_on_all`.
FOR_OTHERS = {"changing_cache"}
OF_LEADERS = {"call_on_all", "check_ranks", "close"}


def public_names(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_public_name_of_an_engine_is_sorted() -> None:
    sorted_names = [*MADE_ON_ALL_RANKS, *READS_AFTER_ENDS, *READS, *FOR_OTHERS]
    assert len(sorted_names) == len(set(sorted_names))
    assert public_names(ms.DynamicInferenceEngine) == set(sorted_names)
    assert public_names(msd.LeadingEngine) == set(sorted_names) | OF_LEADERS


def sent(message: Call) -> Call:
    """The message as a follower reads it."""
    received: Call = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Call)  # type: ignore[arg-type]
    assert type(received) is type(message)
    return received


def test_every_call_that_is_sent_is_one_that_followers_make() -> None:
    calls = set(get_args(CoreCall))
    assert calls == set().union(*MADE_ON_ALL_RANKS.values())
    arguments = {
        "end": (3, "stop"), "unpin": (1,), "set_weights_version": (b"v",), "reset": ("seed", True),
    }  # fmt: skip
    for name in calls - {"add", "pin"}:  # their messages are made of objects
        message = message_of(name, arguments.get(name, ()))
        assert sent(message) == message


def test_everything_that_a_request_was_asked_for_is_sent() -> None:
    """A new field of a request is sorted here: other ranks get it, or it is of this rank."""
    on_all = {
        "request_id", "prompt_tokens", "sampling", "plan", "chain", "seed", "next_token", "given_tokens",
    }  # fmt: skip
    of_this_rank = {
        "arrival_s", "owned", "tokens", "log_probs", "top_log_probs", "prompt_log_probs", "ttft_s",
        "allocation", "ledger", "num_counted", "match", "result", "awaited_tokens", "shared_tokens",
        "may_wait", "_token_view",
    }  # fmt: skip
    assert {field.name for field in fields(DynamicInferenceRequest)} == on_all | of_this_rank
    engine, other = (small_engine() for _ in range(2))
    sampling = ms.SamplingParams(seed=5, stop_token_ids=(7, 9), top_p=0.5)
    plan = ms.CheckpointPlan(marks=(8, 16), decode=8)
    request_id = engine.add_request([1, 2, 3] * 9, sampling, cache_salt=b"tenant", checkpoint_plan=plan)
    request = engine.core.requests[request_id]
    request.given_tokens = [4, 5]
    request.next_token = 6
    sent(Add.of(request)).make(other)
    copy = other.core.requests[request_id]
    for name in on_all - {"chain"}:
        assert getattr(copy, name) == getattr(request, name), name
    assert copy.chain.hashes[:3] == request.chain.hashes[:3]
    assert copy.tokens == [*request.tokens, 4, 5]


class OwnPlan(CheckpointPlan):
    """A user's plan with an attribute of its own."""

    def __init__(self, every: int) -> None:
        super().__init__(decode="off")
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "pairs", ((every, "a"), (2, "b")))


def test_a_plan_of_a_users_class_is_sent_by_its_name() -> None:
    plan = OwnPlan(3)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(PlanFields.of(plan)), type=PlanFields).to_plan()
    assert type(copy) is OwnPlan
    assert vars(copy) == vars(plan)

    class Hidden(OwnPlan):
        pass

    for bad in (Hidden(3), OwnPlan(object())):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^checkpoint_plan is .*; accepted: "):
            PlanFields.of(bad)


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 2**64, [1, (2, {3: ms})], "\ud800", ms.SamplingParams(), CYCLE],
    ids=["object", "set", "long", "module", "surrogate", "dataclass", "cycle"],
)
def test_only_plain_values_are_sent(value: object) -> None:
    with pytest.raises(ValueError, match=r"^version is .*; accepted: None, bool"):
        check_plain("version", (value,))


def test_functions_are_sent_by_name() -> None:
    assert name_of("function", msd.save_prefixes) == "mambaslots.net.transfer.prefix_files:save_prefixes"
    for function in (lambda engine: None, sent.__get__(3), small_engine().step, 3):
        with pytest.raises(ValueError, match=r"^function is .*; accepted: what other ranks can import"):
            name_of("function", function)  # type: ignore[arg-type]


def test_a_step_is_a_few_bytes() -> None:
    assert len(msgspec.msgpack.encode(message_of("step", ()))) < 16
