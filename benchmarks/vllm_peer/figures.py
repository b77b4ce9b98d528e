"""The figures of both sides' printed lines, in one JSON, and how often which side is ahead.

python benchmarks/vllm_peer/figures.py vllm.log ours.log ours_invariant.log --commit COMMIT --json out.json
"""

import argparse
import datetime
import json
import math
from pathlib import Path

TRAFFIC = {
    "conversations": "12 users, 4 turns of 400 tokens after 1,024 shared ones, answers of 48 tokens: 100,608 "
    "prompt tokens",
    "throughput": "256 requests of 1,024 prompt tokens and 256 answer tokens",
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
    elif part == "bits":
        names = {"alone, warm cache": "cold and warm", "one batch, cold cache": "alone and in one batch"}
        if name := names.get(line["what"]):
            side.setdefault("equal_answers_of_24", {})[name] = line["same_tokens"]


def ratios(models, ours):
    """Model, figure -> how many times better than vLLM's."""
    for model, sides in models.items():
        for group, figures in sides["vllm"].items():
            if group in ("equal_answers_of_24", "failed"):
                continue
            for name, theirs in figures.items():
                mine = sides.get(ours, {}).get(group, {}).get(name)
                if mine is not None and name != "resumed_tokens":
                    higher = name in HIGHER_IS_BETTER or group in HIGHER_IS_BETTER
                    yield model, f"{group} {name}", mine / theirs if higher else theirs / mine


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    models = {}
    for line in lines(args.logs):
        name = line["side"] + (", batch_invariant" if line.get("invariant") else "")
        add(models.setdefault(line["model"], {}).setdefault(name, {}), line)
    result = {
        "benchmark": "vllm_peer",
        "date": datetime.date.today().isoformat(),
        "device": args.device,
        "commit": args.commit,
        "versions": {"vllm": "0.26.0", "torch": "2.11.0", "tokenspeed-fa3": "3.0.0.post20260810"},
        "traffic": TRAFFIC,
        "models": models,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for ours in ("mambaslots", "mambaslots, batch_invariant"):
        found = list(ratios(models, ours))
        mean = math.exp(sum(math.log(ratio) for *_, ratio in found) / len(found))
        ahead = f"{sum(ratio >= 1 for *_, ratio in found)} of {len(found)}"
        print(f"{ours}: ahead of vLLM in {ahead} figures; geometric mean of ratios {mean:.2f}")
        for model, figure, ratio in found:
            if ratio < 1:
                print(f"  behind: {model}, {figure}: {ratio:.3f}")


if __name__ == "__main__":
    main()
