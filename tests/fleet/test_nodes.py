"""Replicas on two nodes of a cluster: a node that dies, and one that joins again."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    from oracle.ray_fleet import Fleet
    from ray.cluster_utils import Cluster

CPUS_OF_A_REPLICA = 5  # the first node has 8, so that each node has room for one replica
ANSWER = {"temperature": 0.8, "seed": 5, "max_tokens": 200}


def prompt_of(number: int) -> list[int]:
    return [(11 * number + 5 + i * (number + 2)) % 250 for i in range(120)]


def test_a_node_dies_in_the_middle_of_answers_and_another_one_joins(cluster: "Cluster") -> None:
    from oracle.ray_fleet import add_node, expected_tokens, fleet

    prompts = [prompt_of(number) for number in range(8)]
    right = [expected_tokens(prompt, **ANSWER) for prompt in prompts]

    def answered(made: "Fleet", number: int) -> bool:
        deadline = time.monotonic() + 90
        while True:
            try:
                tokens = [token for part in made.stream(prompts[number], **ANSWER) for token in part]
            except openai.APIError as error:  # the ingress may be on the node: the server says so, or has 503
                if isinstance(error, openai.APIConnectionError) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return tokens == right[number]

    other = add_node(cluster, CPUS_OF_A_REPLICA)
    replicas: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2, "cpus_per_rank": CPUS_OF_A_REPLICA}
    with fleet(replicas) as made, ThreadPoolExecutor(len(prompts)) as clients:
        made.wait_for_replicas(2)
        assert len({parent_of(status.processes[0]) for status in made.statuses()}) == 2, "a node each"
        running = [clients.submit(answered, made, number) for number in range(len(prompts))]
        made.wait_until(lambda: all(status.num_running for status in made.statuses()), "both generate")
        cluster.remove_node(other, allow_graceful=False)
        assert all(answer.result(timeout=120) for answer in running)
        assert made.metrics()["mambaslots_fleet_requests_given_up_total"] == 0
        made.wait_for_replicas(1)
        (survivor,) = made.statuses()
        assert all(answered(made, number) for number in range(3))

        other = add_node(cluster, CPUS_OF_A_REPLICA)
        try:
            made.wait_for_replicas(2)
            (joined,) = (status for status in made.statuses() if status.replica != survivor.replica)
            assert joined.num_states > 0, "the survivor's states were handed over"
            again = [clients.submit(answered, made, number) for number in range(len(prompts))]
            assert all(answer.result(timeout=120) for answer in again)
        finally:
            cluster.remove_node(other)


def parent_of(process: int) -> int:
    """The process of Ray that started it: one a node."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
