"""What a run of the drop-in came to, as lines of text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .built_contexts import SETTINGS, BuiltContext
from .installation import Installation


def described(installation: Installation, contexts: Sequence[BuiltContext]) -> list[str]:
    """Lines of text: one that counts the contexts, and up to three for each of them."""
    if not contexts:
        return [
            "no DynamicInferenceContext was built, so mambaslots had nothing to do; in the script, build "
            f"megatron-core's dynamic engine, and {SETTINGS}"
        ]
    lines = [f"{len(contexts)} {'context' if len(contexts) == 1 else 'contexts'} built"]
    counts = "admission" not in installation.left_alone
    if not counts:
        lines.append("the part admission is left alone, so requests and tokens are not counted")
    for context in contexts:
        lines += [f"  {line}" for line in _described(context, counts)]
    return lines


def _described(context: BuiltContext, counts: bool) -> list[str]:
    name, stats = f"context {context.number}", context.stats
    if context.idle_reason:
        return [f"{name} cached no states: {context.idle_reason}"]
    if counts and not stats.num_requests:
        return [f"{name}: no request was added"]
    reasons = [f"{reason} {count:,}" for reason, count in stats.computed_by_reason.items() if count]
    num_slots = stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots
    states = (
        f"{stats.num_committed_slots:,} of {num_slots:,} slots hold one, {stats.num_states_committed:,} "
        f"taken, {stats.num_states_evicted:,} evicted, {stats.num_dropped_checkpoints:,} planned and dropped"
    )
    if not counts:
        return [f"{name}: states: {states}"]
    again = f", computed again {stats.num_recomputed_tokens:,}" if stats.num_recomputed_tokens else ""
    return [
        f"{name}: requests {stats.num_requests:,}, prompt tokens {stats.num_prompt_tokens:,}, resumed "
        f"{stats.num_resumed_tokens:,} (hit rate {stats.hit_rate:.1%}), computed "
        f"{stats.num_computed_tokens:,}{again}",
        f"  computed by reason: {', '.join(reasons) or 'none'}",
        f"  states: {states}",
    ]


def as_dict(
    installation: Installation, contexts: Sequence[BuiltContext], rank: int, exit_code: int
) -> dict[str, Any]:
    """What `--json` writes: versions and settings, the rank, the script's exit code, all contexts."""
    return installation.as_dict() | {
        "rank": rank,
        "exit_code": exit_code,
        "contexts": [
            {"number": each.number, "idle_reason": each.idle_reason or None, "hit_rate": each.stats.hit_rate}
            | asdict(each.stats)
            for each in contexts
        ],
    }


def write_json(path: Path, rank: int, content: dict[str, Any]) -> None:
    """Write `content` to `path`; for a rank after the first, "-rankN" comes before the suffix."""
    if rank:
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    path.write_text(json.dumps(content, indent=2) + "\n")
