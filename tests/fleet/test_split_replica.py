"""A replica of two ranks: one engine whose model is split over two processes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle.ray_fleet import Fleet


def test_a_replica_of_two_ranks_answers_resumes_and_survives_the_loss_of_a_rank(cluster: None) -> None:
    from oracle.ray_fleet import expected_tokens, fleet

    prompt = [(5 * i + 2) % 250 for i in range(100)]
    answer = expected_tokens(prompt, max_tokens=60, temperature=0)
    with fleet({"ranks": 2, "cpus_per_rank": 0.2}) as split:
        made: Fleet = split
        tokens, resumed = made.complete(prompt, temperature=0, max_tokens=60)
        assert (tokens, resumed) == (answer, 0)
        assert made.complete(prompt, temperature=0, max_tokens=60) == (answer, 96)
        (before,) = made.statuses()
        assert len(set(before.processes)) == 2
        tokens = []
        for part in made.stream(prompt, temperature=0, max_tokens=60):
            if len(tokens) < 10 <= len(tokens) + len(part):
                made.kill(before, rank=1)
            tokens += part
        assert tokens == answer  # of the replica that Ray has started instead
        made.wait_for_replicas(1)
        (after,) = made.statuses()
        assert after.replica != before.replica
        assert made.metrics()["mambaslots_fleet_retries_total"] >= 1
