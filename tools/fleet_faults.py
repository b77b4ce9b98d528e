"""Replicas whose processes are killed, stopped and continued at random: is each request answered, or refused?

    python tools/fleet_faults.py --minutes 4
    python tools/fleet_faults.py --minutes 4 --seed 17       (other faults, at other moments)

Victims are three replicas, the ingress and Ray Serve's controller. SIGKILL hits all of
them; SIGSTOP lasts up to 40 s for replicas and ingress (a guard kills them after 24 s), 10 s for the others.
Clients send prompts whose tokens are known, half of them as streams. An answer must have the right tokens. A
refusal is an error status, or an error event after right tokens, with a sentence. Both come within 90 s.

A line every 15 s says how far it is. The last line has the counts. The exit status is 1 where a token is
wrong, an answer is cut or late, status 503 came though a replica and the ingress were well for 30 s, none was
right, or fewer than three replicas serve 90 s after the last fault.
"""

import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("tests", "examples"))
from arguments import add_count, add_minutes, make_parser

if TYPE_CHECKING:
    from oracle.ray_fleet import Fleet

NUM_REPLICAS = 3
NUM_CLIENTS = 3
TIMEOUT_S = 90.0
RECOVERY_S = 90.0
LINE_S = 15.0
WELL_S = 30.0
VICTIMS = {  # a word of the title of their processes: how often, the longest stop in seconds
    "EngineReplica": (6, 40.0),
    "Ingress": (2, 40.0),
    "ServeController": (2, 10.0),
}
NUM_PROMPTS = 24


class Faults:
    """Draws victims and signals; all stopped processes are continued at the end."""

    def __init__(self, seed: int, workers: Callable[[str], list[int]]) -> None:
        """`workers`: the processes whose title has a word."""
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._workers = workers
        self._stopped: dict[int, tuple[float, str]] = {}
        self._well_since_s: dict[int, float] = {}
        self._ingress_s = 0.0

    def has_well_replica(self) -> bool:
        """Whether a replica has run undisturbed for 30 s, and the ingress, too."""
        horizon = time.monotonic() - WELL_S
        well = any(since_s < horizon for since_s in list(self._well_since_s.values()))
        return well and self._ingress_s < horizon

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pause_s = self._random.uniform(4.0, 14.0)
            kind = self._random.choices(list(VICTIMS), [often for often, _ in VICTIMS.values()])[0]
            stops, stop_s = self._random.random() < 0.5, self._random.uniform(1.0, VICTIMS[kind][1])
            place = self._random.random()
            self._continue(pause_s)
            now, replicas = time.monotonic(), self._workers("EngineReplica")
            self._well_since_s = {
                pid: self._well_since_s.get(pid, now) for pid in replicas if pid not in self._stopped
            }
            running = [pid for pid in self._workers(kind) if pid not in self._stopped]
            if not running:
                continue
            pid = running[int(place * len(running))]
            self._well_since_s.pop(pid, None)
            if kind == "Ingress":
                self._ingress_s = now
            if not sent(pid, signal.SIGSTOP if stops else signal.SIGKILL):
                continue
            self.counts[f"{'SIGSTOP' if stops else 'SIGKILL'} {kind}"] += 1
            if stops:
                self._stopped[pid] = time.monotonic() + stop_s, kind
        self._continue(0.0, all_of_them=True)

    def _continue(self, seconds: float, all_of_them: bool = False) -> None:
        """Wait, and continue what has been stopped for its time."""
        end_s = time.monotonic() + seconds
        while True:
            for pid, (until_s, kind) in list(self._stopped.items()):
                if all_of_them or time.monotonic() >= until_s:
                    del self._stopped[pid]
                    if kind == "Ingress":
                        self._ingress_s = time.monotonic()
                    if pid in self._workers(kind) and sent(pid, signal.SIGCONT):
                        self.counts[f"SIGCONT {kind}"] += 1
            if time.monotonic() >= end_s:
                return
            time.sleep(0.2)


def sent(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Clients:
    """Send requests whose answers are known until they are stopped, and count how each ends."""

    def __init__(self, port: int, seed: int, must_answer: Callable[[], bool]) -> None:
        """`must_answer`: whether a refusal now is a failure."""
        from oracle.ray_fleet import expected_tokens

        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.longest_s = 0.0
        self.is_over = threading.Event()
        self._port, self._seed, self._must_answer = port, seed, must_answer
        self._known = []
        for number in range(NUM_PROMPTS):
            prompt = [(7 * number + 3 + i * (number + 1)) % 250 for i in range(60 + 5 * number)]
            length = 16 + 6 * number
            sampling: dict[str, Any] = (
                {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
            )
            tokens = expected_tokens(prompt, max_tokens=length, **sampling)
            self._known.append(({"prompt": prompt, "max_tokens": length, **sampling}, tokens))

    def run(self, number: int) -> None:
        draws = random.Random(f"{self._seed}-{number}")
        while not self.is_over.is_set():
            self.ask(draws.randrange(NUM_PROMPTS), draws.random() < 0.5)
            time.sleep(draws.uniform(0.0, 0.3))

    def ask(self, number: int, streams: bool) -> str:
        """One request, and how it ended."""
        body, tokens = self._known[number]
        begun_s = time.monotonic()
        try:
            end = self._end(
                json.dumps(body | {"model": "tiny", "return_token_ids": True, "stream": streams}), tokens
            )
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            end = f"failed: {error!r}"
        seconds = time.monotonic() - begun_s
        self.longest_s = max(self.longest_s, seconds)
        if seconds > TIMEOUT_S:
            end = f"failed: late, {end}"
        if end.startswith("refused 503") and seconds < 10 and self._must_answer():
            end = f"failed: {end}, though a replica was well"
        self.counts[end.partition(":")[0]] += 1
        if end.startswith("failed"):
            self.faults.append(
                f"prompt {number}, {'stream' if streams else 'answer'}, {seconds:.1f} s: {end}"
            )
            print(self.faults[-1], flush=True)
        return end

    def _end(self, body: str, tokens: list[int]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            content = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            return f"refused {reply.status}: {json.loads(content)['error']['message']}"
        if not (reply.getheader("content-type") or "").startswith("text/event-stream"):
            found = json.loads(content)["choices"][0]["token_ids"]
            return "right" if found == tokens else f"failed: wrong tokens {found}, not {tokens}"
        found, events = [], [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        for event in events:
            if event == "[DONE]":
                return "right" if found == tokens else f"failed: wrong tokens {found}, not {tokens}"
            one = json.loads(event)
            if "error" in one:
                right = found == tokens[: len(found)] and one["error"]["message"]
                return "ended by an error event" if right else f"failed: wrong tokens {found} before an error"
            found += [token for choice in one["choices"] for token in choice.get("token_ids") or []]
        return f"failed: cut after {len(found)} of {len(tokens)} tokens"


def main() -> int:
    parser = make_parser(__doc__)
    add_minutes(parser, 4.0)
    add_count(parser, "--seed", 0, "of the faults and the requests", at_least=0)
    add_count(parser, "--ingresses", 1, "of the fleet")
    args = parser.parse_args()
    from oracle.ray_fleet import fleet, ray_cluster, workers

    with (
        ray_cluster(),
        fleet(
            {
                "min_replicas": NUM_REPLICAS,
                "max_replicas": NUM_REPLICAS,
                "ingresses": args.ingresses,
                "health_period_s": 5.0,
            },
            request_timeout_s=TIMEOUT_S - 10.0,
        ) as served,
    ):
        faults = Faults(args.seed, workers)
        clients = Clients(served.port, args.seed, faults.has_well_replica)
        threads = [threading.Thread(target=clients.run, args=(number,)) for number in range(NUM_CLIENTS)]
        harm = threading.Thread(target=faults.run, args=(60 * args.minutes,))
        begun_s = time.monotonic()
        for thread in [*threads, harm]:
            thread.start()
        while harm.is_alive():
            harm.join(LINE_S)
            print(
                f"{time.monotonic() - begun_s:5.0f} s  {shown(clients.counts)}; {shown(faults.counts)}",
                flush=True,
            )
        last_s = time.monotonic()
        while (number := num_serving(served)) < NUM_REPLICAS or clients.ask(0, streams=True) != "right":
            if time.monotonic() - last_s > RECOVERY_S:
                clients.faults.append(f"{number} replicas {RECOVERY_S:g} s after the last fault")
                break
            time.sleep(0.5)
        recovery_s = time.monotonic() - last_s
        clients.is_over.set()
        for thread in threads:
            thread.join()
    num_right = clients.counts["right"]
    print(
        f"requests {clients.counts.total()}: {shown(clients.counts)}; longest {clients.longest_s:.1f} s; "
        f"faults {faults.counts.total()}; {NUM_REPLICAS} replicas {recovery_s:.1f} s after the last; "
        f"{len(clients.faults)} failures"
    )
    if args.json is not None:
        found = {
            "seed": args.seed,
            "requests": clients.counts,
            "faults": faults.counts,
            "failures": clients.faults,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return bool(clients.faults or not num_right)


def num_serving(served: "Fleet") -> int:
    try:
        return int(served.metrics()["mambaslots_fleet_replicas"])
    except OSError:  # the ingress begins anew
        return 0


def shown(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
