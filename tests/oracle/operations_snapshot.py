"""Snapshots of a server as `Monitor.snapshot()` gives them, made up: the input of the operator's page."""

import random
from typing import Any

import mambaslots as ms

TIME_S = 1_800_000_000.0
BLOCK = 32
INTERVAL_S = 2
MAX_POINTS = 450


def snapshot(num_requests: int = 0, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A server that has had so many requests; `changes` replace keys of the top level.

    Without requests all counts are 0, and all latencies None.
    """
    draw = random.Random(seed)
    requests = [_request(draw, number, num_requests) for number in reversed(range(num_requests))]
    tokens = {
        name: sum(request[f"{name}_tokens"] for request in requests)
        for name in ("prompt", "resumed", "generated")
    }
    quantiles = {"p50": 0.012, "p90": 0.18, "p99": 1.25} if requests else dict.fromkeys(("p50", "p90", "p99"))
    evicted = {"new_state": 17, "kv_evicted": 4, "rolled": 2, "reset": 0} if requests else {}
    age_s = {"p50": 40.0, "p90": 200.0} if requests else dict.fromkeys(("p50", "p90"))
    made = {
        "time_s": TIME_S,
        "uptime_s": 4000.0 if requests else 3.0,
        "model": "tiny-code",
        "version": "0.1.0",
        "warnings": [],
        "engine": {
            "description": ["an engine of 12 layers", "  attention: reference"],
            "running": 3 * bool(requests), "waiting": 2 * bool(requests), "paused": 0, "max_requests": 16,
        },
        "pools": {
            "states": {
                "total": 64, "pinned": 5, "committed": 40, "reserved": 2, "live": 3,
                "free": 19, "bytes_each": 1_300_000,
            },
            "kv": {
                "total": 256, "held": 40, "cached": 150, "free": 66, "bytes_each": 65536,
                "block_size_tokens": BLOCK,
            },
        },
        "tokens": {
            **tokens, "recomputed": 0, "by_reason": _by_reason(requests),
            "saved_s": 3.6 if requests else None,
        },
        "evictions": {"by_cause": evicted, "age_s": age_s},
        "latency": {name: dict(quantiles) for name in ("ttft_s", "inter_token_s", "step_s")},
        "tenants": _tenants(requests),
        "series": {"every_s": INTERVAL_S, "points": _points(draw, requests)},
        "requests": requests[:100],
    }  # fmt: skip
    return made | changes


def _request(draw: random.Random, number: int, num_requests: int) -> dict[str, Any]:
    blocks = draw.randint(2, 40)
    prompt = blocks * BLOCK + draw.randint(1, BLOCK)
    resumed = draw.choice((0, blocks // 2, blocks - 1, blocks)) * BLOCK
    last = blocks * BLOCK if resumed < blocks * BLOCK else resumed
    spans = [[resumed, last, draw.choice(ms.COMPUTE_REASONS[:5])]] if last > resumed else []
    running = number >= num_requests - 2
    return {
        "id": number,
        "tenant": draw.choice(("default", "search", "support")),
        "arrived_s": TIME_S - 7.0 * (num_requests - number),
        "prompt_tokens": prompt,
        "resumed_tokens": resumed,
        "spans": [*spans, [last, prompt, "partial_block"]],
        "generated_tokens": draw.randint(1, 200),
        "finish_reason": None if running else draw.choice(("stop", "length")),
        "ttft_s": draw.uniform(0.003, 0.4),
        "inter_token_s": draw.uniform(0.002, 0.02),
        "why": "A state deeper in this prompt was evicted; more states (num_mamba_slots) keep it.",
    }


def _by_reason(requests: list[dict[str, Any]]) -> dict[str, int]:
    found = dict.fromkeys(ms.COMPUTE_REASONS, 0)
    for request in requests:
        for start, stop, reason in request["spans"]:
            found[reason] += stop - start
    return found


def _tenants(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name in sorted({request["tenant"] for request in requests}):
        own = [request for request in requests if request["tenant"] == name]
        tokens = {
            f"{what}_tokens": sum(request[f"{what}_tokens"] for request in own)
            for what in ("prompt", "resumed")
        }
        found.append({"name": name, "requests": len(own), **tokens})
    return found


def _points(draw: random.Random, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An interval's point counts what arrived in the interval."""
    points = []
    for number in range(MAX_POINTS if requests else 1):
        stop = TIME_S - INTERVAL_S * (MAX_POINTS - 1 - number) if requests else TIME_S
        own = [request for request in requests if stop - INTERVAL_S < request["arrived_s"] <= stop]
        points.append(
            {
                "time_s": stop,
                "prompt": sum(request["prompt_tokens"] for request in own),
                "resumed": sum(request["resumed_tokens"] for request in own),
                "generated": sum(request["generated_tokens"] for request in own),
                "by_reason": _by_reason(own),
                "states_committed": min(40, number // 5),
                "states_pinned": draw.randint(0, 5) if number > 30 else 0,
                "kv_cached": min(150, number), "kv_held": draw.randint(10, 40),
                "running": draw.randint(0, 6), "waiting": draw.choice((0, 0, 0, 2)),
            }
        )  # fmt: skip
    return points
