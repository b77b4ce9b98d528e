"""Two replicas of a split model: one hands its cached prefixes to the other, and is killed.

    python examples/torchrun_serving.py

Each replica is a `torchrun --nproc-per-node 2` of its own. A hybrid model is split over the two ranks of each
replica (tensor parallelism, gloo, CPU). Both replicas serve conversations, turn by turn. Then replica A hands
its cached prefixes to replica B, and one rank of A is killed. B goes on with all conversations; those of A
resume from the states that A handed over. A second hand-over, for which B waits while A dies, is only a miss.

The last line says whether all answers are those of the whole model in one process without a cache. The exit
code is 1 if they are not, or if the first hand-over did not arrive. It takes a quarter of a minute.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
import torch.distributed as dist
from conversation_texts import conversations
from torchrun_replica import CONFIG, settings

RANKS = 2
ANSWER = 24  # tokens


class Replica:
    """A torchrun of `torchrun_replica.py`, which takes orders over a store."""

    def __init__(self, name: str, store: dist.TCPStore) -> None:
        self.name = name
        self._store = store
        self._orders = 0
        script = Path(__file__).with_name("torchrun_replica.py")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the replica runs
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                str(script), name, f"127.0.0.1:{store.port}",
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=self._stderr,
        )  # fmt: skip

    def wait_until_up(self) -> list[int]:
        """Block until all ranks have started; their process ids."""
        return [int(self._store.get(f"{self.name}/pid/{rank}")) for rank in range(RANKS)]

    def order(self, order: str, **arguments: Any) -> int:
        """Give an order; returns its number, by which `answer` asks for the answer."""
        number = self._orders
        self._store.set(f"{self.name}/order/{number}", json.dumps([order, arguments]))
        self._orders += 1
        return number

    def answer(self, number: int) -> tuple[Any, float]:
        """Block until the order is done; rank 0's answer, and how many seconds the order took."""
        key = f"{self.name}/answer/{number}"
        while not self._store.check([key]):
            if self._process.poll() is not None:
                self._stderr.seek(0)
                raise RuntimeError(f"replica {self.name} has ended:\n{self._stderr.read()}")
            time.sleep(0.01)
        answer, seconds = json.loads(self._store.get(key))
        return answer, seconds

    def kill_a_rank(self) -> int:
        """Kill one rank, whereupon torchrun ends the others; the exit code of torchrun."""
        os.kill(self.wait_until_up()[1], signal.SIGKILL)
        return self._process.wait()

    def stop(self) -> None:
        if self._process.poll() is None:
            self.order("stop")
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()


class Conversations:
    """Transcripts as bytes; they grow by what users say and by what replicas answer."""

    def __init__(self, count: int, turns: int) -> None:
        self._users = conversations(count, turns)
        self.transcripts = [list(user.system_prompt.encode()) for user in self._users]
        self.exchanges: list[tuple[list[int], list[int]]] = []  # (prompt, answer) of every request

    def ask(self, turn: int, users: list[int], replica: Replica) -> int:
        """Let `users` say what they say in `turn`; the number of the order to the replica."""
        for user in users:
            text = f"\n\nUser: {self._users[user].turns[turn].text}\nAssistant: "
            self.transcripts[user] += text.encode()
        return replica.order("serve", prompts=[self.transcripts[user] for user in users], length=ANSWER)

    def receive(self, turn: int, users: list[int], replica: Replica, number: int) -> None:
        """Take the answers to order `number`, and print a line about them."""
        answers, seconds = replica.answer(number)
        for user, answer in zip(users, answers, strict=True):
            self.exchanges.append((list(self.transcripts[user]), answer["tokens"]))
            self.transcripts[user] += answer["tokens"]
        prompt, resumed = (sum(answer[key] for answer in answers) for key in ("prompt", "resumed"))
        print(
            f"turn {turn + 1}  replica {replica.name}  users {users}  prompt tokens {prompt:5d}  "
            f"resumed {resumed:5d} ({resumed / prompt:4.0%})  {seconds:4.1f} s",
            flush=True,
        )


@contextmanager
def replicas(names: str) -> Iterator[list[Replica]]:
    """Running replicas; this process hosts their store, and outlives them."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
    )
    started = [Replica(name, store) for name in names]
    try:
        for replica in started:
            replica.wait_until_up()
        yield started
    finally:
        for replica in started:
            replica.stop()


def hand_over(source: Replica, target: Replica, prefixes: list[list[int]]) -> bool:
    """Hand cached prefixes of one replica to another; whether they arrived."""
    name = f"{source.name} to {target.name}"
    sent = source.order("send", hand_over=name, prefixes=prefixes, timeout_s=30)
    received = target.order("receive", hand_over=name, timeout_s=30)
    failure, _ = source.answer(sent)
    report, seconds = target.answer(received)
    print(
        f"hand-over {name}: {report['prefixes']} prefixes, {report['blocks']} KV blocks, "
        f"{report['states']} states in {seconds * 1e3:.0f} ms {failure or report['failure']}".rstrip()
    )
    return not (failure or report["failure"])


def kill_before_it_hands_over(source: Replica, target: Replica) -> None:
    """Let `target` wait for a hand-over from `source`, one of whose ranks is killed."""
    received = target.order("receive", hand_over=f"{source.name} to {target.name}, again", timeout_s=3)
    exit_code = source.kill_a_rank()
    print(f"one rank of replica {source.name} is killed: its torchrun ends with exit code {exit_code}")
    report, seconds = target.answer(received)
    print(f"the next hand-over from it is a miss after {seconds:.1f} s: {report['failure']}")


def expected_answers(prompts: list[list[int]]) -> list[list[int]]:
    """The answers of the whole model, in this process, without a cache."""
    uncached = settings(enable_prefix_caching=False, num_mamba_slots=None)
    engine = ms.DynamicInferenceEngine(ms.models.HybridLM(CONFIG, seed=0), uncached)
    sampling = ms.SamplingParams(max_tokens=ANSWER)
    return [result.tokens for result in engine.generate(prompts, sampling)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    torch.set_num_threads(1)
    talk = Conversations(count=6, turns=4)
    users_of_a, users_of_b = [0, 1, 2], [3, 4, 5]
    with replicas("AB") as (a, b):
        print(f"replicas A and B, each a torchrun of {RANKS} ranks: tensor parallelism {RANKS}")
        for turn in range(2):
            orders = [
                (users, replica, talk.ask(turn, users, replica))
                for users, replica in ((users_of_a, a), (users_of_b, b))
            ]
            for users, replica, number in orders:
                talk.receive(turn, users, replica, number)
        arrived = hand_over(a, b, [talk.transcripts[user] for user in users_of_a])
        kill_before_it_hands_over(a, b)
        for turn in (2, 3):
            for users in (users_of_a, users_of_b):
                talk.receive(turn, users, b, talk.ask(turn, users, b))
    expected = expected_answers([prompt for prompt, _ in talk.exchanges])
    num_same = sum(answer == other for (_, answer), other in zip(talk.exchanges, expected, strict=True))
    print(
        f"{num_same} of {len(expected)} answers are those of the whole model in one process without a cache"
    )
    print(f"outputs identical: {'yes' if num_same == len(expected) else 'no'}")
    return 0 if arrived and num_same == len(expected) else 1


if __name__ == "__main__":
    sys.exit(main())
