"""Malformed requests: is each refused in a sentence, and is nothing lost?

Starts the server over loopback, sends good requests, then malformed ones, then the good ones again. Checked:

- each malformed request gets a status from 400 to 499 and a JSON error with a message and a request id;
- its message has at most 400 characters, and names nothing of the server's code;
- afterwards no request runs or waits, no KV block is held, no state is pinned, and `check_integrity()`
  passes;
- the good requests are answered as before, from the cache.

The table has a row for each kind of malformed request: how many were sent, and how many got each status.
`largest growth` is how much the process grew while they were sent, in MiB.
"""

import http.client
import json
import resource
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
import uvicorn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from arguments import add_count, make_parser
from fuzzing.malformed_bodies import GOOD, JSON, MAX_BODY_BYTES, Malformed, Sent
from mambaslots.serve import ServerSettings, make_app

MODEL = Path(__file__).parents[1] / "models/tiny-code"


@dataclass
class Client:
    """A connection that is made again where the server has closed it."""

    port: int
    connection: http.client.HTTPConnection | None = None

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any, bytes]:
        """The status, the headers and the body of the answer."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.connection.request("POST", path, body, headers)
        response = self.connection.getresponse()
        content = response.read()
        if response.will_close or response.getheader("connection") == "close":
            self.connection.close()
            self.connection = None
        return response.status, response.headers, content


@dataclass
class Outcome:
    """What was sent, and what was wrong with the answers."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, sent: Sent, status: int, headers: Any, content: bytes) -> None:
        self.statuses.setdefault(sent.kind, Counter())[status] += 1
        fault = fault_of(status, headers, content)
        if fault is not None:
            self.faults.append(f"{sent.kind}: {fault}: {sent.body[:200]!r} to {sent.path}: {content[:300]!r}")


def fault_of(status: int, headers: Any, content: bytes) -> str | None:
    """What is wrong with the answer to a malformed request; None where nothing is."""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        error = json.loads(content)["error"]
        message = error["message"]
    except (ValueError, KeyError, TypeError):
        return "no error in OpenAI's shape"
    if set(error) != {"message", "type", "param", "code"} or not isinstance(message, str) or not message:
        return "no error in OpenAI's shape"
    if len(message) > 400 or any(word in message for word in ("Traceback", ".py", "object at 0x")):
        return "a message that is no sentence for clients"
    return None if headers.get("x-request-id", "").startswith("req-") else "no request id"


def answers(client: Client) -> list[Any]:
    """What the good requests are answered, without ids and times."""
    found = []
    for path, body in GOOD.items():
        whole = body | {"stream": False, "temperature": 0, "return_token_ids": True, "max_tokens": 32}
        status, _, content = client.send(path, json.dumps(whole).encode(), JSON)
        found.append((status, json.loads(content)["choices"]))
    return found


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--bodies", 2000, "malformed requests")
    add_count(parser, "--seed", 0, "of the requests", at_least=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = ms.load(MODEL, dtype=torch.float32)
    config = ms.InferenceConfig(
        block_size_tokens=32, max_requests=8, max_tokens_per_step=512, num_kv_blocks=512, num_mamba_slots=64,
        max_sequence_length=2048,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(loaded.model, config)
    settings = ServerSettings(model_name="tiny-code", max_body_bytes=MAX_BODY_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(engine, loaded, settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        figures = measure(options.bodies, options.seed, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
    stats = engine.stats()
    engine.check_integrity()
    figures["left"] = {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "held KV blocks": stats.cache.num_held_kv_blocks,
        "reserved slots": stats.cache.num_reserved_slots,
        "pins": len(engine.pins()),
    }
    if any(figures["left"].values()):
        figures["faults"].append(f"left: {figures['left']}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return report(figures)


def measure(num_bodies: int, seed: int, port: int) -> dict[str, Any]:
    """Send everything to the server at `port`."""
    client, malformed, outcome = Client(port), Malformed(seed), Outcome()
    first = answers(client)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    for _ in range(num_bodies):
        sent = malformed.draw()
        outcome.note(sent, *client.send(sent.path, sent.body, sent.headers))
    seconds = time.perf_counter() - begin
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if answers(client) != first or any(status != 200 for status, _ in first):
        outcome.faults.append("good requests are not answered as before")
    rows = {kind: dict(sorted(statuses.items())) for kind, statuses in sorted(outcome.statuses.items())}
    return {"rows": rows, "faults": outcome.faults, "seconds": seconds, "growth_mib": growth, "seed": seed}


def report(figures: dict[str, Any]) -> int:
    """Print the table. Returns the exit code."""
    rows: dict[str, dict[int, int]] = figures["rows"]
    statuses = sorted({status for row in rows.values() for status in row})
    print(f"{'malformed request':20}{'sent':>8}" + "".join(f"{status:>8}" for status in statuses))
    for kind, row in rows.items():
        print(f"{kind:20}{sum(row.values()):8}" + "".join(f"{row.get(status, 0):8}" for status in statuses))
    totals = [sum(row.get(status, 0) for row in rows.values()) for status in statuses]
    print(f"{'all':20}{sum(totals):8}" + "".join(f"{total:8}" for total in totals))
    print(f"seconds {figures['seconds']:.1f}, largest growth {figures['growth_mib']:.1f} MiB")
    print("left: " + ", ".join(f"{what} {number}" for what, number in figures["left"].items()))
    print(f"faults: {len(figures['faults'])}")
    for fault in figures["faults"][:10]:
        print(f"  {fault}")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
