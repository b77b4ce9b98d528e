"""`mambaslots replay`: what a cache of this or that size would have resumed, without a model."""

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ..named_policies import PLAN_SYNTAX, cache_changes
from ..replay.generate import KINDS
from ..replay.setting import MODELS, STATE_DTYPES, ReplaySetting, model_shape
from .options import add_group, add_json, comma_list, count, positive

if TYPE_CHECKING:
    from ..replay.report import TraceSource

TEXT = """\
The scheduler, the cache and its policies are those of the engine; the clock counts steps. The table says
which share of all prompt tokens is resumed with each budget. The last lines answer "How much memory do I
give it?"."""
BUDGETS_GB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_group(parser, "traffic", None, (
        ("--trace", comma_list(_origin), "chat", "LIST",
         f"generated traces ({', '.join(KINDS)}), all of these by the name all, or files: JSON lines of your "
         "own traffic or in Mooncake's format; divided by commas"),
        ("--seed", count(0), 0, "N", "of generated traces"),
        ("--requests", count(), None, "N", "the first requests of each trace only"),
        ("--speed", positive, 1.0, "N", "requests arrive N times as fast as in the trace"),
        ("--concurrency", count(), 32, "N", "requests that run at once; 1 replays one after another"),
    ))  # fmt: skip
    group = add_group(parser, "memory", None, (
        ("--budget-gb", comma_list(positive), None, "LIST",
         "memory for cached states, in GB (default, unless --total-gb is given: 1,2,4,...,64)"),
        ("--kv-gb", positive, 20.0, "GB", "for KV"),
        ("--total-gb", comma_list(positive), None, "LIST",
         "memory for live states, cached states and KV together"),
        ("--host-gb", positive, 0.0, "GB", "host memory for evicted states"),
        ("--model", str, "nemotron-h-8b", "MODEL",
         f"whose sizes count: {', '.join(MODELS)} or the path of a config.json"),
        ("--block-size-tokens", count(), 256, "N", "tokens of a KV block"),
    ))  # fmt: skip
    group.add_argument("--state-dtype", choices=STATE_DTYPES, help="of cached states (default: the model's)")
    add_group(parser, "cache", None, (
        ("--policy", comma_list(str), None, "LIST",
         "eviction policies, a line each: names, or FILE.py:Class (default: the engine's)"),
        ("--plan", str, None, "PLAN", f"which states are cached: {PLAN_SYNTAX}; or FILE.py:Class"),
    ))  # fmt: skip
    add_json(parser, "all results")
    parser.set_defaults(policy=[None])


def run(options: argparse.Namespace) -> int:
    for policy in options.policy:
        cache_changes(policy, options.plan)  # a wrong option is refused before torch is imported
    settings = settings_of(options)
    from ..replay import report
    from ..replay.compared_caches import UNLIMITED, OwnCache

    caches = [OwnCache(policy, options.plan) for policy in options.policy]
    cells = []  # trace by trace, budget by budget, cache by cache; the unlimited pool once a trace
    for source in sources_of(options):
        cells += [report.Cell(source, cache, setting) for setting in settings for cache in caches]
        cells.append(report.Cell(source, UNLIMITED, settings[0]))
    results = []
    begun_s = time.monotonic()
    for cell in cells:
        results.append(report.replay_cell(cell))
        progress = f"{len(results):,} of {len(cells):,} cells, {time.monotonic() - begun_s:,.1f} s"
        print(f"replay: {progress}", file=sys.stderr)
    unlimited = report.unlimited_shares(results)
    sentences = list(dict.fromkeys(report.sizing_sentences(results, unlimited, caches[0].name)))
    print(report.table(results))
    print("\nHow much memory do I give it?")
    for sentence in sentences:
        print(sentence)
    if options.json:
        content = {
            "settings": asked_of(options) | report.plain_setting(settings[0]), "unlimited": unlimited,
            "results": [report.as_plain(result) for result in results], "answers": sentences,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    is_served = any(result.share is not None for result in results if result.cell.cache != UNLIMITED)
    return 0 if is_served else 1


def settings_of(options: argparse.Namespace) -> list[ReplaySetting]:
    """One for each budget, those for states first."""
    shape = model_shape(options.model, options.state_dtype)
    budgets = options.budget_gb or ([] if options.total_gb else BUDGETS_GB)
    common: dict[str, Any] = {
        "max_requests": options.concurrency,
        "block_size_tokens": options.block_size_tokens,
        "host_gb": options.host_gb,
    }
    if options.block_size_tokens % shape.grid_tokens:
        accepted = f"accepted for {shape.name}: a multiple of {shape.grid_tokens}"
        raise ValueError(f"--block-size-tokens is {options.block_size_tokens}; {accepted}")
    return [
        *(ReplaySetting(shape, state_gb, options.kv_gb, **common) for state_gb in dict.fromkeys(budgets)),
        *(ReplaySetting(shape, total_gb=gb, **common) for gb in dict.fromkeys(options.total_gb or [])),
    ]


def sources_of(options: argparse.Namespace) -> "list[TraceSource]":
    from ..replay.report import TraceSource

    return [
        TraceSource(origin, options.seed, options.requests, options.speed)
        for origin in dict.fromkeys(options.trace)
    ]


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as plain values."""
    names = "trace seed requests speed policy plan model state_dtype"
    return {name: getattr(options, name) for name in names.split() if hasattr(options, name)}


def _origin(text: str) -> list[str]:
    if text == "all":
        return list(KINDS)
    if text not in KINDS and not os.path.isfile(text):
        accepted = ", ".join((*KINDS, "all"))
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: {accepted}, or a file that is there")
    return [text]
