"""The tables of `gpu_serving.py`: each figure beside its limit, and whether it meets what is required."""

from typing import Any

MAX_OVER_LIMIT = 1.35
MAX_IDLE = 0.05
MAX_COST = 0.01
Requirement = tuple[str, float, float]
"""What is measured, its value, and the most that it may be."""


def print_part(name: str, figures: Any) -> None:
    """Print the figures of one part."""
    for line in PRINTERS[name](figures):
        print(line)


def _prefill(rows: list[dict[str, float]]) -> list[str]:
    lines = ["prefill     tokens   forward ms      step ms  products ms   forward/products"]
    return lines + [
        f"        {row['tokens']:10,} {row['forward_ms']:12.2f} {row['step_ms']:12.2f} "
        f"{row['products_ms']:12.2f} {row['forward_ms'] / row['products_ms']:17.2f}x"
        for row in rows
    ]


def _decode(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["decode    requests   context   step ms   mean ms   limit ms   step/limit    idle     gap"]
    for row in rows:
        trace = row.get("trace", {})
        idle = f"{trace['idle_share']:7.1%} {trace['gap_share']:7.1%}" if "idle_share" in trace else ""
        lines.append(
            f"        {row['requests']:10,} {row['context']:9,} {row['step_ms']:9.3f} {row['mean_ms']:9.3f} "
            f"{row['limit_ms']:10.3f} {row['step_ms'] / row['limit_ms']:11.2f}x {idle}"
        )
    for row in rows:
        if "kernels" in row.get("trace", {}):
            lines += _kernels(f"a decode step of {row['requests']}", row["trace"]["kernels"])
    return lines


def _kernels(what: str, table: dict[str, Any]) -> list[str]:
    lines = [f"kernels of {what}: {table['launches']:,.0f} launches, {table['us']:,.0f} us"]
    lines += [
        f"    {row['name']:20} {row['launches']:8,.0f} {row['us']:12,.1f} us {row['share']:7.1%}"
        for row in table["families"]
    ]
    return lines


def _conversations(figures: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for name, row in figures.items():
        lines.append(
            f"conversations {name:14} first token {row['first_token_median_ms']:8.1f} ms "
            f"(p90 {row['first_token_p90_ms']:.1f}), between tokens {row['between_tokens_median_ms']:.2f} ms "
            f"(p99 {row['between_tokens_p99_ms']:.1f}), {row['generated_tokens_per_s']:,.0f} generated and "
            f"{row['tokens_per_s']:,.0f} tokens/s, resumed {row['resumed_tokens']:,.0f} of "
            f"{row['prompt_tokens']:,.0f}"
        )
    return lines


def _checkpoints(row: dict[str, float]) -> list[str]:
    cost, spread = checkpoint_cost(row)
    return [
        f"prefill of {row['tokens']:,}: {row['without_forward_ms']:.3f} ms; storing {row['states']} states "
        f"{row['with_forward_ms']:.3f} ms: {cost:+.2%} (without, again: {spread:+.2%})"
    ]


def checkpoint_cost(row: dict[str, float]) -> tuple[float, float]:
    """How much longer the forward with states takes, and how far two without differ."""
    without, again = row["without_forward_ms"], row["without_again_forward_ms"]
    return 2 * row["with_forward_ms"] / (without + again) - 1, again / without - 1


def _cold(row: dict[str, float]) -> list[str]:
    return [
        f"{row['prompts']} prompts of {row['tokens']:,} tokens without reuse: {row['off_s']:.3f} s without "
        f"cache, {row['on_s']:.3f} s with: {row['on_s'] / row['off_s'] - 1:+.2%}"
    ]


def _rolling(row: dict[str, float]) -> list[str]:
    return [
        f"decode of {row['requests']}: {row['off_ms']:.3f} ms a step, with rolling states "
        f"{row['rolling_ms']:.3f} ms: {row['rolling_ms'] / row['off_ms'] - 1:+.2%}"
    ]


def _transformers(row: dict[str, float] | None) -> list[str]:
    if row is None:
        return []
    return [
        f"transformers' forward of {row['tokens']:,}: {row['forward_ms']:.2f} ms (wall {row['wall_ms']:.2f})"
    ]


def _prefill_trace(table: dict[str, Any]) -> list[str]:
    lines = _kernels(f"a prefill of {table['tokens']:,}", table)
    return [
        *lines,
        f"    from first to last {table['span_us']:,.0f} us, nothing ran for {table['idle_us']:,.0f}",
    ]


PRINTERS = {
    "transformers": _transformers,
    "prefill": _prefill,
    "prefill_trace": _prefill_trace,
    "checkpoints": _checkpoints,
    "decode": _decode,
    "rolling": _rolling,
    "cold": _cold,
    "conversations": _conversations,
}


def requirements(name: str, parts: dict[str, Any]) -> list[Requirement]:
    """What one model must meet, of the parts that were measured."""
    found: list[Requirement] = []
    prefills = {row["tokens"]: row for row in parts.get("prefill", ())}
    compared = prefills.get(4096)
    if compared is not None:
        theirs = parts.get("transformers")
        if name == "Qwen3.5-4B" and theirs:
            ratio = compared["forward_ms"] / theirs["forward_ms"]
            found.append((f"{name}: prefill of 4,096 / transformers' own", ratio, 1.0))
        elif name != "Qwen3.5-4B":
            ratio = compared["forward_ms"] / compared["products_ms"]
            found.append((f"{name}: prefill of 4,096 / its products", ratio, MAX_OVER_LIMIT))
    for row in parts.get("decode", ()):
        if row["requests"] in (1, 32):
            what = f"{name}: decode of {row['requests']}"
            found.append((f"{what} / its bytes", row["step_ms"] / row["limit_ms"], MAX_OVER_LIMIT))
            if "idle_share" in row.get("trace", {}):
                found.append((f"{what}: GPU idle between steps", row["trace"]["idle_share"], MAX_IDLE))
    if "checkpoints" in parts:
        row = parts["checkpoints"]
        found.append((f"{name}: {row['states']} checkpoints in a prefill", checkpoint_cost(row)[0], MAX_COST))
    if "rolling" in parts:
        row = parts["rolling"]
        found.append((f"{name}: rolling states", row["rolling_ms"] / row["off_ms"] - 1, MAX_COST))
    if "cold" in parts:
        row = parts["cold"]
        found.append((f"{name}: cache on, nothing reused", row["on_s"] / row["off_s"] - 1, MAX_COST))
    return found


def list_requirements(models: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What all models must meet, and whether they do."""
    return [
        {"what": what, "value": value, "most": most, "met": value <= most}
        for name, parts in models.items()
        for what, value, most in requirements(name, parts)
    ]
