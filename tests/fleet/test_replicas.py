"""Two replicas and ingresses at one address: right answers, second turns where their states are, losses."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from mambaslots.fleet.replica import ReplicaStatus
    from oracle.ray_fleet import Fleet

GREEDY = {"temperature": 0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 24}


def prompt_of(number: int, length: int = 100) -> list[int]:
    return [(7 * number + 3 + i * (number + 1)) % 250 for i in range(length)]


def expected(prompt: list[int], **sampling: Any) -> list[int]:
    from oracle.ray_fleet import expected_tokens

    return expected_tokens(prompt, **sampling)


@pytest.fixture(scope="module")
def two(cluster: None) -> "Iterator[Fleet]":
    from oracle.ray_fleet import fleet

    with fleet({"min_replicas": 2, "max_replicas": 2, "ingresses": 2}) as made:
        yield made


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_one_engine_without_a_cache(two: "Fleet", sampling: dict[str, Any]) -> None:
    prompts = [prompt_of(number) for number in range(6)]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda prompt: two.complete(prompt, **sampling)[0], prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == expected(prompt, **sampling)
        assert [token for part in two.stream(prompt, **sampling) for token in part] == answer


def test_a_second_turn_goes_to_the_replica_that_holds_its_state(two: "Fleet") -> None:
    conversations = [prompt_of(number, 90) for number in range(20, 26)]
    for turn in range(3):
        for number, tokens in enumerate(conversations):
            answer, resumed = two.complete(tokens, **GREEDY)
            assert answer == expected(tokens, **GREEDY)
            if turn:
                assert resumed >= len(tokens) - 24 - 5 - 32 - 32, (turn, number)
            tokens += [*answer, 1, 2, 3, 4, 5]
    metrics = two.metrics()
    assert metrics["mambaslots_fleet_replicas"] == 2
    assert metrics["mambaslots_fleet_replicas_lost_total"] == 0


def test_bad_requests_are_refused_as_one_engine_refuses_them(two: "Fleet") -> None:
    with pytest.raises(openai.BadRequestError, match="max_sequence_length"):
        two.complete([1] * 5000)
    with two.client as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=[1, 2])


def test_a_client_that_leaves_ends_its_request(two: "Fleet") -> None:
    with two.client as client:
        parts = client.completions.create(
            model="tiny", prompt=prompt_of(40), stream=True, max_tokens=1500, temperature=0
        )
        next(iter(parts))
        assert two.holder().num_running == 1
        parts.close()
    two.wait_until(lambda: not any(status.num_running for status in two.statuses()), "the request has left")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_replica_killed_in_mid_stream_costs_a_retry_and_no_token(
    two: "Fleet", sampling: dict[str, Any]
) -> None:
    two.wait_for_replicas(2)
    before = two.metrics()
    wanted = dict(sampling, max_tokens=120)
    prompt, tokens, killed = prompt_of(50), [], None
    for part in two.stream(prompt, **wanted):
        tokens += part
        if killed is None and len(tokens) >= 10:
            killed = two.holder()
            two.kill(killed)
    assert tokens == expected(prompt, **wanted)
    metrics = two.metrics()
    for name in ("mambaslots_fleet_replicas_lost_total", "mambaslots_fleet_retries_total"):
        assert metrics[name] - before[name] == 1
    assert killed is not None
    two.wait_until(lambda: replaced(two, killed), "Ray has started another replica")


def replaced(fleet: "Fleet", lost: "ReplicaStatus") -> bool:
    names = [status.replica for status in fleet.statuses()]
    return len(names) == 2 and lost.replica not in names


def test_a_replica_that_joins_takes_over_states_and_resumes_from_them(two: "Fleet") -> None:
    two.wait_for_replicas(2)
    conversations = [prompt_of(number, 90) for number in range(70, 76)]
    for tokens in conversations:
        tokens += [*two.complete(tokens, **GREEDY)[0], 1, 2, 3, 4, 5]
    before = two.statuses()
    two.kill(before[0])
    two.wait_until(lambda: replaced(two, before[0]), "Ray has started another replica")
    (joined,) = (status for status in two.statuses() if status.replica not in [one.replica for one in before])
    committed = two.metrics()[f'mambaslots_state_slots {{"replica": "{joined.replica}", "use": "committed"}}']
    assert committed > 0
    two.kill(before[1])  # what is left is what has joined
    resumed = []
    for tokens in conversations:
        answer, number = two.complete(tokens, **GREEDY)
        assert answer == expected(tokens, **GREEDY)
        resumed.append(number)
    assert sum(map(bool, resumed)) >= 2, resumed


def test_a_replica_that_stands_still_costs_its_streams_a_retry_and_others_nothing(two: "Fleet") -> None:
    """SIGSTOP in the middle of a stream: no 503, the stream continues elsewhere, Ray replaces the replica."""
    two.wait_for_replicas(2)
    wanted = SAMPLED | {"max_tokens": 150}
    prompt, tokens, pauses, stopped, last_s = prompt_of(90), [], [], None, time.monotonic()
    for part in two.stream(prompt, **wanted):
        pauses.append(time.monotonic() - last_s)
        last_s = time.monotonic()
        tokens += part
        if stopped is None and len(tokens) >= 10:
            stopped = two.holder()
            two.kill(stopped, signal=signal.SIGSTOP)
    stopped_s = last_s - max(pauses)
    assert tokens == expected(prompt, **wanted)
    assert max(pauses) < 10
    assert stopped is not None
    number = 91
    while time.monotonic() - stopped_s < 60:
        begun_s = time.monotonic()
        assert two.get("/health") == {"status": "ok"}
        assert two.complete(prompt_of(number), **GREEDY)[0] == expected(prompt_of(number), **GREEDY)
        assert time.monotonic() - begun_s < 10, number
        number += 1
        if len(replicas_in(two.metrics()) - {stopped.replica}) == 2:
            break
        time.sleep(0.5)
    two.wait_until(lambda: replaced(two, stopped), "Ray has started another replica", 1)
    two.wait_until(
        lambda: not two.is_alive(stopped), "the process is killed", stopped_s + 60 - time.monotonic()
    )


def replicas_in(metrics: dict[str, float]) -> set[str]:
    """Names of the replicas whose figures are there."""
    labels = (name.partition(" ")[2] for name in metrics)
    return {json.loads(label)["replica"] for label in labels if '"replica"' in label}


def test_one_of_two_ingresses_that_is_killed_costs_its_own_streams_alone(two: "Fleet") -> None:
    """They end with an error event; others continue, new requests are served, and no count goes down."""
    from oracle.ray_fleet import workers

    two.wait_for_replicas(2)
    two.wait_until(lambda: len(workers("Ingress")) == 2, "two ingresses")
    before = two.metrics()["mambaslots_fleet_requests_total"]
    wanted, prompts = SAMPLED | {"max_tokens": 150}, [prompt_of(number) for number in range(210, 218)]
    tokens: list[list[int]] = [[] for _ in prompts]

    def read(number: int) -> str:
        try:
            for part in two.stream(prompts[number], **wanted):
                tokens[number] += part
        except openai.APIError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [clients.submit(read, number) for number in range(len(prompts))]
        two.wait_until(lambda: all(len(some) >= 5 for some in tokens), "all of them run")
        time.sleep(0.5)  # the replicas know both ingresses' numbers
        os.kill(workers("Ingress")[0], signal.SIGKILL)
        for number in range(220, 230):
            assert two.get("/health") == {"status": "ok"}
            assert two.complete(prompt_of(number), **GREEDY)[0] == expected(prompt_of(number), **GREEDY)
    errors = [answer.result() for answer in answers]
    for prompt, some, error in zip(prompts, tokens, errors, strict=True):
        whole = expected(prompt, **wanted)
        assert some == (whole[: len(some)] if error else whole)
        assert not error or "was lost; send the request again" in error
    assert 0 < sum(map(bool, errors)) < len(errors), errors
    for _ in range(5):
        assert two.metrics()["mambaslots_fleet_requests_total"] == before + len(prompts) + 10
        time.sleep(0.3)


def test_a_stream_that_loses_its_ingress_ends_with_an_error_event(two: "Fleet") -> None:
    from oracle.ray_fleet import workers

    two.wait_for_replicas(2)
    wanted, tokens = SAMPLED | {"max_tokens": 150}, list[int]()

    def read() -> None:
        for part in two.stream(prompt_of(200), **wanted):
            tokens.extend(part)
            if len(tokens) >= 10:
                for process in workers("Ingress"):
                    os.kill(process, signal.SIGKILL)

    with pytest.raises(openai.APIError, match="was lost; send the request again"):
        read()
    assert tokens == expected(prompt_of(200), **wanted)[: len(tokens)]
    assert two.complete(prompt_of(200), **wanted)[0] == expected(prompt_of(200), **wanted)


def test_replicas_that_are_replaced_end_what_they_run(two: "Fleet") -> None:
    two.wait_for_replicas(2)
    before = {status.replica for status in two.statuses()}
    prompts, wanted = [prompt_of(number) for number in range(80, 84)], GREEDY | {"max_tokens": 150}
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(lambda prompt: list(two.stream(prompt, **wanted)), one) for one in prompts]
        two.wait_until(lambda: sum(status.num_running for status in two.statuses()) == 4, "all of them run")
        two.deploy(max_requests=7)  # the settings are others: Ray drains each replica, and starts another one
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [token for part in answer.result() for token in part]
        assert tokens == expected(prompt, **wanted)
    assert before.isdisjoint(status.replica for status in two.statuses())
