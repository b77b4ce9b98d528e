"""The figures of both sides' printed lines, in one document, and how often which side is ahead."""

import datetime
import json
import math

TRAFFIC = {
    "conversations": "12 users, 4 turns of 400 tokens after 1,024 shared ones, answers of 48 tokens: 100,608 "
    "prompt tokens",
    "throughput": "256 requests of 1,024 prompt tokens and 256 answer tokens",
    "clients": "16 prompts of 8,192 tokens at once, answers of 1,024",
}
HIGHER_IS_BETTER = ("tokens_per_s", "throughput")


def lines(paths):
    """What `common.emit` printed."""
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def add(side, line):
    """Put one line's figures where the table looks for them; a part that failed has none."""
    part = line["part"]
    if part == "engine" and "failed" not in line:
        return
    if "failed" in line:
        side.setdefault("failed", []).append(part)
    elif part == "ttft":
        side.setdefault("first_token_ms", {})[str(line["tokens"])] = round(line["ms"], 1)
    elif part == "hits":
        side.setdefault("first_token_after_hit_ms", {})[str(line["known"])] = round(line["ms"], 1)
    elif part == "decode" and line["rows"] == 1 and round(line["context"], -3) != 3000:
        context = "512" if line["context"] < 1000 else "4096"
        side.setdefault("decode_of_1_ms", {})[context] = round(line["ms"], 2)
    elif part == "decode" and line["rows"] > 1:
        side.setdefault("decode_at_3000_ms", {})[str(line["rows"])] = round(line["ms"], 2)
    elif part == "conversations" and line["caching"]:
        side[part] = {
            "first_token_ms": round(line["first_token_mean_ms"]),
            "resumed_tokens": line["cached_tokens"],
            "tokens_per_s": round(line["generated_tokens_per_s"]),
        }
    elif part == "throughput":
        name = f"{line['shared']} shared" if line["shared"] else "nothing shared"
        side.setdefault(part, {})[name] = round(line["generated_tokens_per_s"])
    elif part == "clients":
        side[part] = {
            "first_token_ms": round(1e3 * line["first_token_mean_s"]),
            "tokens_per_s": round(line["generated_tokens_per_s"]),
        }
    elif part == "bits":
        names = {"alone, warm cache": "cold and warm", "one batch, cold cache": "alone and in one batch"}
        if name := names.get(line["what"]):
            side.setdefault("equal_answers_of_24", {})[name] = line["same_tokens"]


def ratios(models, ours):
    """Model, figure -> how many times better than vLLM's."""
    for model, sides in models.items():
        for group, figures in sides.get("vllm", {}).items():
            if group in ("equal_answers_of_24", "failed"):
                continue
            for name, theirs in figures.items():
                mine = sides.get(ours, {}).get(group, {}).get(name)
                if mine is not None and name != "resumed_tokens":
                    higher = name in HIGHER_IS_BETTER or group in HIGHER_IS_BETTER
                    yield model, f"{group} {name}", mine / theirs if higher else theirs / mine


def document(logs, device, commit):
    """The result of both sides' logs."""
    models, versions = {}, {}
    for line in lines(logs):
        name = line["side"] + (", batch_invariant" if line.get("invariant") else "")
        side = models.setdefault(line["model"], {}).setdefault(name, {})
        add(side, line)
        versions |= line.get("versions", {})
    return {
        "benchmark": "vllm_peer", "date": datetime.date.today().isoformat(), "device": device,
        "commit": commit, "versions": versions, "traffic": TRAFFIC, "models": models,
    }  # fmt: skip


def print_table(models):
    """A row for each figure, a column for each side."""
    for model, sides in models.items():
        print(f"\n{model:36}" + "".join(f"{side:>30}" for side in sides))
        kinds = {kind: None for side in sides.values() for kind in side if kind != "failed"}
        for kind in kinds:
            for name in {name: None for side in sides.values() for name in side.get(kind, ())}:
                found = (side.get(kind, {}).get(name, "-") for side in sides.values())
                print(f"{kind + ' ' + name:36}" + "".join(f"{figure:>30}" for figure in found))


def print_verdict(models):
    """How often which of our sides is ahead, and where it is behind."""
    for ours in ("mambaslots", "mambaslots, batch_invariant"):
        if not (found := list(ratios(models, ours))):
            continue
        mean = math.exp(sum(math.log(ratio) for *_, ratio in found) / len(found))
        ahead = f"{sum(ratio >= 1 for *_, ratio in found)} of {len(found)}"
        print(f"{ours}: ahead of vLLM in {ahead} figures; geometric mean of ratios {mean:.2f}")
        for model, figure, ratio in found:
            if ratio < 1:
                print(f"  behind: {model}, {figure}: {ratio:.3f}")
