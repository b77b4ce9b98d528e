"""How much memory a model takes while it is loaded, beside transformers' own `from_pretrained`.

A synthetic model of a mixture of experts, bfloat16, in several shards, one tensor an expert, is loaded
on the CPU in processes of their own. What is printed is the largest resident memory during the load, over
that before it, and its ratio to the floor: all weights, and once more the largest tensor that is merged of
several. Two figures a load: all resident pages, and anonymous ones alone, because a file that is mapped is
resident, too, though the system may take its pages back. The latter are sampled each millisecond.

    python benchmarks/load_weights.py --megabytes 1024 --json out.json

The exit code is 1 if a load of ours takes more than the floor.
"""

import json
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.command_line import add_count, make_parser

VOCABULARY, HIDDEN, EXPERTS, EXPERT_WIDTH = 32768, 1024, 32, 512
NAMES = ("ours", "ours, float32", "transformers")


@dataclass
class Load:
    """Bytes of one load; `floor` is the weights and the largest merged tensor."""

    name: str
    seconds: float
    weights: int
    floor: int
    peak: int
    anonymous_peak: int

    @property
    def ratio(self) -> float:
        return self.peak / self.floor


def make_model(folder: str, megabytes: int) -> None:
    """Save a model of about this size; its weights are whatever the memory held, mostly zeros."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

    layer = 2 * 3 * EXPERTS * HIDDEN * EXPERT_WIDTH
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=max(1, megabytes * 10**6 // layer),
        num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        num_experts=EXPERTS, num_experts_per_tok=4,
        moe_intermediate_size=EXPERT_WIDTH, shared_expert_intermediate_size=EXPERT_WIDTH,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="200MB")


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


class AnonymousPeak:
    """The largest anonymous resident memory while the context is open."""

    def __enter__(self) -> "AnonymousPeak":
        self.bytes, self._open = memory("RssAnon"), True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    def _sample(self) -> None:
        while self._open:
            self.bytes = max(self.bytes, memory("RssAnon"))
            time.sleep(0.001)


def measure(name: str, folder: str) -> Load:
    """Load the model in this process, which has loaded nothing before."""
    import torch
    from mambaslots import hf
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # imports what the model needs
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    before, anonymous_before = memory("VmRSS"), memory("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin = time.perf_counter()
    with AnonymousPeak() as anonymous:
        model: Any
        if name == "transformers":
            model = AutoModelForCausalLM.from_pretrained(folder)
        else:
            model = hf.load(folder, dtype=torch.float32 if "float32" in name else None).model
    seconds = time.perf_counter() - begin
    peak = memory("VmHWM") - before
    weights = sum(weight.nbytes for weight in model.parameters())
    merged = max(weight.nbytes for key, weight in model.named_parameters() if ".experts." in key)
    return Load(name, seconds, weights, weights + merged, peak, anonymous.bytes - anonymous_before)


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--megabytes", 1024, "size of the model", at_least=100)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, spawn) as process:
            process.submit(make_model, folder, args.megabytes).result()
        shards = sorted(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"model: {sum(shards) / 1e6:,.0f} MB in {len(shards)} shards")
        loads = []
        for name in NAMES:
            with ProcessPoolExecutor(1, spawn) as process:
                loads.append(process.submit(measure, name, folder).result())
    print(f"{'':15}{'weights':>10}{'floor':>10}{'peak':>10}{'over floor':>12}{'anonymous':>11}{'s':>7}")
    for load in loads:
        sizes = "".join(f"{size / 1e6:>10,.0f}" for size in (load.weights, load.floor, load.peak))
        figures = f"{load.ratio:>11.2f}x{load.anonymous_peak / 1e6:>11,.0f}{load.seconds:>7.1f}"
        print(f"{load.name:15}{sizes}{figures}")
    if args.json:
        args.json.write_text(json.dumps([asdict(load) for load in loads], indent=2) + "\n")
    good = all(load.ratio <= 1 for load in loads if load.name.startswith("ours"))
    print(f"our peaks are at most the floor: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
