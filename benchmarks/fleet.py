"""Which share of prompts replicas on Ray Serve resume, and how even their load is.

Conversations with a few system prompts come to replicas of a small model on this machine's CPU, over HTTP.
They are compared with one engine that has the memory of all
replicas. Needs the extra `mambaslots[fleet]`."""

import argparse
import http.client
import json
import logging
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMPUTED = ("mambaslots_computed_prompt_tokens_total", "mambaslots_generated_tokens_total")
BLOCK = 32
SALT_KEY = "the key of all replicas of a benchmark"


@dataclass(frozen=True)
class SmallEngine:
    """Makes a replica's engine; can be pickled."""

    num_kv_blocks: int
    num_slots: int
    max_requests: int

    def __call__(self, groups: Any = None) -> Any:
        import mambaslots as ms

        torch.set_num_threads(1)
        model = ms.models.HybridLM(ms.models.HybridConfig.tiny(vocab_size=259), seed=0)
        config = ms.InferenceConfig(
            block_size_tokens=BLOCK,
            max_tokens_per_step=512,
            max_requests=self.max_requests,
            max_sequence_length=4096,
            num_kv_blocks=self.num_kv_blocks,
            num_mamba_slots=self.num_slots,
            salt_key=SALT_KEY,
        )
        engine = ms.DynamicInferenceEngine(model, config)
        engine.set_weights_version("a benchmark's tiny model")
        return engine


def no_text() -> Any:
    from mambaslots.loaded_model import LoadedText
    from mambaslots.text import GenerationDefaults

    return LoadedText(None, GenerationDefaults(), Path("tiny"))


@dataclass
class Conversation:
    """Its tokens so far, and what is still to come."""

    tokens: list[int]
    draws: random.Random
    num_turns: int


def conversations(options: argparse.Namespace) -> list[Conversation]:
    draws = random.Random(options.seed)
    systems = [[draws.randrange(250) for _ in range(6 * BLOCK)] for _ in range(options.systems)]
    made = []
    for _ in range(options.conversations):
        own = random.Random(draws.random())
        system = systems[min(own.randrange(options.systems), own.randrange(options.systems))]
        made.append(Conversation(list(system), own, own.randint(2, 2 * options.turns - 2)))
    return made


def serve_turn(port: int, conversation: Conversation, num_answer: int) -> tuple[int, int]:
    """Prompt tokens of one turn, and how many of them were resumed."""
    draws = conversation.draws
    conversation.tokens += [draws.randrange(250) for _ in range(draws.randint(24, 96))]
    body = {
        "prompt": conversation.tokens, "max_tokens": num_answer, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {answer}")
    num_prompt = len(conversation.tokens)
    conversation.tokens += answer["choices"][0]["token_ids"]
    return num_prompt, (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def traffic(port: int, options: argparse.Namespace) -> dict[str, float]:
    """Serve all conversations, turns of many of them in turn, by `--clients` clients."""
    everything = conversations(options)
    draws = random.Random(options.seed + 1)
    active, waiting = everything[: options.active], everything[options.active :]
    prompt = resumed = requests = 0
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as clients:
        while active:  # a wave: some of the active conversations have their next turn
            wave = draws.sample(active, min(options.clients, len(active)))
            for one, (num_prompt, num_resumed) in zip(
                wave, clients.map(lambda one: serve_turn(port, one, options.answer), wave), strict=True
            ):
                prompt, resumed, requests = prompt + num_prompt, resumed + num_resumed, requests + 1
                one.num_turns -= 1
                if not one.num_turns:
                    active.remove(one)
                    if waiting:
                        active.append(waiting.pop(0))
    return {
        "requests": requests,
        "prompt_tokens": prompt,
        "resumed_share": resumed / prompt,
        "seconds": time.perf_counter() - begun_s,
    }


def loads(port: int) -> list[tuple[float, float]]:
    """Requests, and tokens computed, of each replica."""
    from prometheus_client.parser import text_string_to_metric_families

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    requests: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.labels.get("replica")
            if name is None:
                continue
            if sample.name == "mambaslots_requests_added_total":
                requests[name] = sample.value
            if sample.name in COMPUTED:
                tokens[name] = tokens.get(name, 0.0) + sample.value
    return [(requests[name], tokens[name]) for name in sorted(requests)]


def measure(port: int, num_replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Deploy replicas, serve the traffic, and end them."""
    from mambaslots.fleet import FleetSettings
    from mambaslots.fleet.fleet_server import fleet_application
    from mambaslots.serve import ServerSettings
    from ray import serve

    share = options.replicas // num_replicas
    make = SmallEngine(options.kv_blocks * share, options.slots * share, options.max_requests * share)
    settings = FleetSettings(
        min_replicas=num_replicas, max_replicas=num_replicas, cpus_per_rank=0.1,
        max_requests=make.max_requests, warm_timeout_s=0.0,
    )  # fmt: skip
    server = ServerSettings(model_name="tiny", port=port)
    serve.run(fleet_application(make, no_text, SALT_KEY, server, settings), name=settings.name)
    try:
        row: dict[str, Any] = {"replicas": num_replicas} | traffic(port, options)
        by_replica = loads(port)
    finally:
        serve.delete(settings.name)
    for number, what in enumerate(("requests", "tokens")):
        values = [load[number] for load in by_replica]
        row[f"max_to_mean_{what}"] = max(values) * len(values) / sum(values)
    row["by_replica"] = by_replica
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = "replicas" if row["replicas"] > 1 else "one engine"
    return (
        f"{name:18} {row['requests']:8.0f} {row['resumed_share']:8.1%} {row['share_of_one']:8.1%} "
        f"{row['max_to_mean_requests']:10.2f} {row['max_to_mean_tokens']:8.2f} {row['seconds']:6.1f}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument(
        "--turns", type=int, default=5, help="of a conversation, in the mean (default: %(default)s)"
    )
    parser.add_argument("--systems", type=int, default=6, help="system prompts (default: %(default)s)")
    parser.add_argument("--active", type=int, default=24, help="conversations at once (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--kv-blocks", type=int, default=192, help="of a replica (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=24, help="states of a replica (default: %(default)s)")
    parser.add_argument("--max-requests", type=int, default=4, help="of a replica (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    import ray
    from mambaslots.fleet.fleet_server import QUIET, usable_port
    from ray import serve

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20,
        log_to_driver=False, logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = usable_port("127.0.0.1", 0)
    serve.start(proxy_location="HeadOnly", http_options={"port": port}, logging_config=QUIET)
    rows = []
    print(f"{'':18} {'':>8} {'resumed':>8} {'of one':>8}    max/mean of replicas")
    print(f"{'':18} {'requests':>8} {'share':>8} {'engine':>8} {'requests':>10} {'tokens':>8} {'s':>6}")
    try:
        for number in (1, options.replicas):
            row = measure(port, number, options)
            rows.append(row)
            row["share_of_one"] = row["resumed_share"] / rows[0]["resumed_share"]
            print(line(row), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    import fleet  # replicas find what makes their engines in a module, not in a script

    fleet.main()
