"""Tables of the docs, made of what was measured and of marks in tests.

    python tools/docs_tables.py              (make docs: writes them)

A page holds `<!-- table: NAME (tools/docs_tables.py) -->`, the table, and `<!-- end -->`. Figures are those
of benchmarks/results/*.json. docs/disasters.md is written whole, of tests with the mark `disaster`.
"""

import argparse
import ast
import importlib.util
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "benchmarks" / name for name in ("README.md", "results/README.md")),
]
TABLE = re.compile(r"(<!-- table: (.+?) \(tools/docs_tables\.py\) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@cache
def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


# ---- figures


def gpu() -> str:
    """Whole engine steps on one H200."""
    models = results("gpu_serving_h200")["models"]
    names = ("HybridLM-8B", "Nemotron-H-8B", "Qwen3.5-4B")

    def prefill(tokens: int) -> list[str]:
        steps = [next(p for p in models[name]["prefill"] if p["tokens"] == tokens) for name in names]
        return [f"{step['step_ms']:.1f} ({step['step_ms'] / step['products_ms']:.2f})" for step in steps]

    def decode(requests: int) -> list[str]:
        found = [[d for d in models[name]["decode"] if d["requests"] == requests] for name in names]
        return [
            f"{d[0]['step_ms']:.2f} ({d[0]['step_ms'] / d[0]['limit_ms']:.2f})" if d else "" for d in found
        ]

    def conversations(key: str, cache: str) -> list[str]:
        return [number(models[names[0]]["conversations"][cache][key]), "", ""]

    rows = [
        *([f"first token of a prompt of {size:,} tokens, ms", *prefill(size)] for size in (4096, 16384)),
        *([f"{described(f'decode of {count} at 3,000')}, ms", *decode(count)] for count in (1, 8, 32, 128)),
        [
            "12 users, 4 turns, no cache: mean time to first token, ms",
            *conversations("first_token_mean_ms", "without cache"),
        ],
        [
            "12 users, 4 turns, with cache: mean time to first token, ms",
            *conversations("first_token_mean_ms", "with cache"),
        ],
        [
            "12 users, 4 turns, no cache: generated tokens per second",
            *conversations("generated_tokens_per_s", "without cache"),
        ],
        [
            "12 users, 4 turns, with cache: generated tokens per second",
            *conversations("generated_tokens_per_s", "with cache"),
        ],
    ]
    note = (
        "\nFor a prompt, the lower bound is the time of the model's matrix products alone. For a decode\n"
        "step, it is the number of bytes that the step must move (weights, states, KV), divided by the\n"
        "bandwidth of a large copy.\n"
    )
    return markdown(["one NVIDIA H200, bfloat16; in brackets: time / its lower bound", *names], rows) + note


def described(work: str) -> str:
    """A row of the costs in words: "decode of 1 at 512" is a step of one request."""
    kind, _, context = work.partition(" at ")
    if not context:
        return f"{kind} tokens"
    requests = int(kind.removeprefix("decode of "))
    return f"decode step of {requests} request{'s' * (requests > 1)} with {context} tokens of context"


def bits_cost() -> str:
    models = {name: model for name, model in results("bits_h200")["models"].items() if "costs" in model}
    ratios = {
        name: {cost["what"]: cost["ratio"] for cost in model["costs"]} for name, model in models.items()
    }
    works = list(dict.fromkeys(work for found in ratios.values() for work in found))
    rows = [
        [
            described(work),
            *(f"{100 * (found[work] - 1):+.1f} %" if work in found else "-" for found in ratios.values()),
        ]
        for work in works
    ]
    return markdown(["time with `batch_invariant`, compared with the time without, one H200", *models], rows)


def hand_over() -> str:
    found = results("hand_over_nccl_h200x2")["nccl"]["rows"].items()
    return markdown(
        [
            *("prefix of an 8B model, two H200", "size of KV and state", "time to hand over (NCCL)"),
            "time to compute",
        ],
        (
            [
                f"{int(n):,} tokens",
                f"{r['MiB']:.0f} MiB",
                f"{r['received']:.1f} ms",
                f"{r['computed']:.0f} ms",
            ]
            for n, r in found
        ),
    )


def prefill_apart() -> str:
    rows = [
        [
            f"{row['prompt']:,}",
            {"1 + 1": "one prefills, one decodes", "2 mixed": "both do both"}[row["way"]],
            *(number(row[f"first token {which}"]) for which in ("median", "p95")),
            *(number(row[f"gap {which}"], 1) for which in ("median", "p95")),
            number(row["tokens/s"]),
        ]
        for row in results("disaggregated_prefill_h200x2")["rows"]
        if row["answer"] == 64 and row["way"] != "1 mixed"
    ]
    head = [
        *("prompt, tokens", "two engines", "time to first token, median, ms", "time to first token, p95, ms"),
        *("time between tokens, median, ms", "time between tokens, p95, ms", "generated tokens a second"),
    ]
    return markdown(head, rows)


def routers() -> str:
    rows = [
        [
            row["router"],
            f"{100 * row['share']:.1f} %",
            f"{100 * row['share_of_one_cache']:.1f} %",
            f"{row['token_imbalance']:.2f}",
        ]
        for row in results("replay_routed")["results"]
        if (row["trace"], row["num_replicas"], row["state_gb"]) == ("chat, seed 0", 4, 2.0)
        and row["router"] != "one cache"
    ]
    head = [
        *("router", "share of prompt tokens resumed"),
        "this share / that of one cache with the same total memory",
        "tokens computed by the busiest replica / mean of all replicas",
    ]
    return markdown(head, rows)


def all_routers() -> str:
    """% resumed; % of one cache with all memory; the busiest replica's computed tokens over the mean."""
    cells: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    names: dict[str, None] = {}
    for row in results("replay_routed")["results"]:
        if row["num_replicas"] > 1 and row["state_gb"] == 2.0:
            names[row["router"]] = None
            share, of_one = 100 * row["share"], 100 * row["share_of_one_cache"]
            cell = f"{share:.1f}; {of_one:.1f}; {row['token_imbalance']:.2f}"
            cells[row["trace"].partition(",")[0], row["num_replicas"]][row["router"]] = cell
    rows = ([trace, str(count), *(found[name] for name in names)] for (trace, count), found in cells.items())
    return markdown(["trace", "replicas", *names], rows)


def _economy(name: str, budget: str, rows: Iterable[str]) -> str:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in sorted(results(name)["results"], key=lambda row: row[budget] or 0):
        if row[budget] is not None:
            found[row["row"], row["trace"].partition(",")[0]].append(f"{100 * row['share']:.1f}")
    traces = ("chat", "agent", "documents", "fork")
    return markdown(
        ["", *traces], ([row, *(" / ".join(found[row, trace]) for trace in traces)] for row in rows)
    )


def economy() -> str:
    """% of prompt tokens resumed, by GB for states."""
    peers = ("megatron-core", "used-node-cap-3", "tail-branch", "marconi", "sglang", "sglang-cap-3")
    return _economy("replay_seed5", "state_gb", ("ours", "ours-lru", *peers, "belady-density", "planned"))


def economy_total() -> str:
    """% of prompt tokens resumed, by GB for states and KV together."""
    return _economy("replay_total", "total_gb", ("ours", "ours-lru", "sglang", "sglang-cap-3", "vllm"))


def shares() -> str:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in results("replay_total")["results"]:
        if row["total_gb"] == 22.0:
            found[row["row"]][row["trace"].partition(",")[0]] = row["share"]
    traces = ("chat", "agent", "documents", "fork")
    names = {
        "ours": "mambaslots",
        "ours-lru": "mambaslots, LRU",
        "vllm": "vLLM's rules",
        "sglang": "SGLang's rules",
        "sglang-cap-3": "SGLang's rules with `--mamba-max-states-per-path 3` (default: no limit)",
    }
    rows = ([name, *(f"{100 * found[row][trace]:.1f} %" for trace in traces)] for row, name in names.items())
    return markdown(["prompt tokens resumed by", *traces], rows)


def megatron() -> str:
    versions = results("mcore_h200")
    runs = [run for found in versions.values() for run in found["runs"] if not run["whole_prompts"]]
    names = [f"{version}, {run['name']}" for version, found in versions.items() for run in found["runs"][1:]]
    figures = {
        "time to first token, mean, ms": "ttft_mean_s",
        "time to first token, 90th percentile, ms": "ttft_p90_s",
        "time to first token in later turns, mean, ms": "later_ttft_mean_s",
    }
    rows = [
        *([what, *(number(1e3 * run["speed"][name]) for run in runs)] for what, name in figures.items()),
        ["output tokens a second", *(number(run["speed"]["output_tokens_a_second"]) for run in runs)],
    ]
    resumed = [median(timed["num_resumed_tokens"] for timed in run["timed"]) for run in runs]
    rows.append(["resumed of 53,448 prompt tokens", *(f"{tokens:,}" for tokens in resumed)])
    return markdown(["one H200, bfloat16, CUDA graphs", *names], rows)


def vllm() -> str:
    """One GPU, the same requests and the same clock."""
    found, answers = results("vllm_peer_h100"), results("vllm_peer_answers_h100")["equal_answers_of_24"]
    models = {model: sides for model, sides in found["models"].items() if "vllm" in sides}
    names = [f"{model}: {side}" for model, found in models.items() for side in found]
    sides = [
        figures | {"equal": answers[model].get(side, {})}
        for model, found in models.items()
        for side, figures in found.items()
    ]

    def row(what: str, group: str, key: str, unit: str = "") -> list[str]:
        figures = [side.get(group, {}).get(key) for side in sides]
        return [what, *("-" if figure is None else f"{figure:,}{unit}" for figure in figures)]

    rows = [
        *(
            row(f"first token of {int(n):,} tokens, ms", "first_token_ms", n)
            for n in ("512", "4096", "16384")
        ),
        *(
            row(f"first token of 512 after {int(n):,} known, ms", "first_token_after_hit_ms", n)
            for n in ("2048", "8192", "32768", "131072")
        ),
        *(row(f"decode step of 1 at {int(n):,} tokens, ms", "decode_of_1_ms", n) for n in ("512", "4096")),
        *(row(f"decode step of {n} at 3,000 tokens, ms", "decode_at_3000_ms", n) for n in ("8", "32", "128")),
        row("conversations: first token, ms", "conversations", "first_token_ms"),
        row("conversations: resumed of 100,608 tokens", "conversations", "resumed_tokens"),
        row("conversations: tokens a second", "conversations", "tokens_per_s"),
        row("256 requests: tokens a second", "throughput", "nothing shared"),
        row("the same, 768 tokens shared", "throughput", "768 shared"),
        row("equal answers, cold and warm", "equal", "cold and warm", " of 24"),
        row("equal answers, alone and in a batch", "equal", "alone and in one batch", " of 24"),
    ]
    return markdown([f"one {found['device']}", *names], rows)


def day(result: Any) -> str:
    """The date of a result, such as "23 November 2026"."""
    date = datetime.fromisoformat(result["date"])
    return f"{date.day} {date:%B %Y}"


def picture() -> str:
    """What docs/figures.png shows, measured where and when."""
    ours, peers = results("gpu_serving_h200"), results("vllm_peer_h100")
    versions = peers["versions"]
    return paragraph(f"""
        Left: one {ours["device"]}, torch {ours["torch"].partition("+")[0]}, {day(ours)}. Middle: one
        {peers["device"]}, vLLM {versions["vllm"]}, torch {versions["torch"]}, {day(peers)}, mambaslots at
        commit {peers["commit"]}. Left and middle: bfloat16, random weights, 12 users with 4 turns each;
        mambaslots without [`batch_invariant`](docs/bits.md). Right: replayed traces of requests; "vLLM's
        rules" and "SGLang's rules" are our implementations of the caches of vLLM and SGLang. [The comparison
        with vLLM](benchmarks/README.md#compared-with-vllm) has the commands and all figures, including those
        in which vLLM is faster.""")


def demo() -> str:
    """What `make demo` prints."""
    result = results("demo_cpu")
    assert result["outputs_identical"]
    share = result["num_resumed_tokens"] / result["prompt_tokens"]
    cold, warm = (result["ttft_ms"][side]["mean"] for side in ("without_cache", "with_cache"))
    return paragraph(f"""
        `make demo` serves {result["conversations"]} conversations with a small model on a CPU, without the
        cache and with it. With the cache, {100 * share:.0f} % of the prompt tokens are resumed, the mean
        time to the first token is {warm:.0f} instead of {cold:.0f} ms, and the answers are the same.""")


def readme() -> str:
    """What others lack, with a figure each."""
    shared = {
        row["row"]: f"{100 * row['share']:.0f} %"
        for row in results("replay_total")["results"]
        if row["total_gb"] == 22.0 and row["trace"].startswith("chat")
    }
    peers = results("vllm_peer_h100")["models"]
    first = {
        side: peers["Nemotron-H-8B"][side]["conversations"]["first_token_ms"]
        for side in ("vllm", "mambaslots", "mambaslots, batch_invariant")
    }
    answers = results("vllm_peer_answers_h100")["equal_answers_of_24"]["Qwen3.5-4B"]
    ours, theirs = answers["mambaslots, batch_invariant"], answers["vllm"]
    tier = results("host_tier_h100")["resumed"]
    more = results("encoded_states_h100")["slots"][0]["slots"]["int8"]
    rows = [
        [
            "Evicts the state whose loss costs the fewest recomputed tokens",
            "share of prompt tokens resumed in a chat trace, with 22 GB for states and KV: "
            f"{shared['ours']}; with vLLM's rules: {shared['vllm']}; with SGLang's rules: {shared['sglang']}",
            "`python benchmarks/replay/rows.py`",
        ],
        [
            "Stores a state near the end of each answer; the conversation's next turn resumes from it",
            f"mean time to the first token in conversations, Nemotron-H-8B: {first['mambaslots']} ms "
            f"(with `batch_invariant`: {first['mambaslots, batch_invariant']} ms); vLLM 0.26: "
            f"{first['vllm']} ms",
            "[comparison](benchmarks/README.md#compared-with-vllm)",
        ],
        [
            "With `batch_invariant`, gives the same bits with and without the cache, alone and in a batch",
            f"of 24 answers of Qwen3.5-4B, the cache left {ours['cold and warm']} unchanged (vLLM 0.26: "
            f"{theirs['cold and warm']}), and a batch left {ours['alone and in one batch']} unchanged "
            f"(vLLM 0.26: {theirs['alone and in one batch']})",
            "[comparison](benchmarks/README.md#compared-with-vllm)",
        ],
        [
            "Says why each prompt token was computed, and which setting would avoid this, if one would",
            "9 reasons, shown in the server's page and metrics",
            "[operations](docs/operations.md)",
        ],
        [
            "Keeps evicted states in host memory",
            "prompt tokens resumed with GPU memory for a tenth of the states, relative to memory for all: "
            f"{100 * tier['a tenth']['share']:.0f} %; with host memory in addition: "
            f"{100 * tier['tier']['share']:.0f} %",
            "`python benchmarks/host_tier.py`",
        ],
        [
            "Stores states as int8",
            f"{more:.1f} times as many states per GB as float32",
            "`python benchmarks/encoded_states.py`",
        ],
        [
            "Is tested for known faults of other caches",
            "24 faults of vLLM, SGLang and LMCache, 24 of megatron-core",
            "[disasters](docs/disasters.md), [megatron](docs/megatron.md#the-faults)",
        ],
    ]
    return markdown(["mambaslots", "figure", "shown by"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "bits cost": bits_cost,
    "hand over": hand_over,
    "prefill apart": prefill_apart,
    "routers": routers,
    "all routers": all_routers,
    "economy": economy,
    "economy total": economy_total,
    "shares": shares,
    "megatron": megatron,
    "vllm": vllm,
    "picture": picture,
    "demo": demo,
    "readme": readme,
}


# ---- disasters


def marked_tests() -> dict[int, Counter[str]]:
    """Number of a disaster -> files of its tests, with how many each has."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.disaster" not in (source := path.read_text()):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.disaster":
                        found[ast.literal_eval(mark.keywords[0].value)][str(path.relative_to(ROOT))] += 1
    return found


def disasters() -> str:
    spec = importlib.util.spec_from_file_location("disasters", ROOT / "tests/oracle/disasters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = marked_tests()
    rows = [
        [str(n), what, where, ", ".join(f"`{file}` ({count})" for file, count in sorted(tests[n].items()))]
        for n, (what, where) in module.DISASTERS.items()
    ]
    return DISASTERS_PAGE + markdown(["#", "what happened", "where", "tests"], rows)


DISASTERS_PAGE = """# Disasters of others

This page is generated: `make docs`.

The table lists faults of other caches of recurrent states. The column "where" names the threads that report
a fault. The column "tests" names files, with the number of tests in parentheses. These tests fail if
mambaslots has the fault. Most of them compare states or answers with a token-by-token recurrence or with
plain torch. The others test what is refused, counted, freed or copied. If a test could also pass because
nothing is resumed, the test asserts that there were hits.

`pytest -m "disaster(number=4) and not gpu"` runs the tests of number 4 that need no GPU.

"""


# ---- writing


def written(path: Path) -> str:
    """The page with its tables of today."""
    if path.name == "disasters.md":
        return disasters()
    return TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[4], path.read_text())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for path in PAGES:
        if (text := written(path)) != path.read_text():
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
