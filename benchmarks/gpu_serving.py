"""What states cost while an 8B hybrid model serves: inside a prefill, and while decoding. And graphs.

1. A prefill of 4,096 tokens that stores a state at every block boundary, against the same launch storing
   none: the same tensors, with -1 in the place of the slots.
2. Decode steps that keep a rolling state a request, against the same requests without.
3. Decode steps by CUDA graph, against eager ones.

    python benchmarks/gpu_serving.py --json out.json                (one GPU; random bfloat16 weights)
    python benchmarks/gpu_serving.py --shape tiny --device cpu      (does it run?)

The shape is Nemotron-H-8B's; `--layers` builds only the first ones. Both sides of each row alternate; times
are medians, of a forward on the GPU by events (1), or of whole engine steps by the clock (2, 3).
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mambaslots as ms
import torch
from command_line import add_count, add_device, make_parser
from mambaslots.inference.contexts.request import DynamicInferenceRequest
from mambaslots.inference.policies.prefix_hash import PrefixHashChain

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 131072, "hidden_size": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "mamba_num_groups": 8, "mamba_state_dim": 128, "conv_kernel": 4, "ssd_chunk_size": 128,
        "num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mlp_hidden_size": 21504,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "mamba_num_groups": 2, "mamba_state_dim": 16, "conv_kernel": 4, "ssd_chunk_size": 16,
        "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_hidden_size": 128,
    },
}  # fmt: skip
MOST = 0.01
MARGIN = 80  # tokens decoded while others are prefilled, or graphs captured


class Bench:
    """A model, and engines that serve it; `scale` shrinks the tiny shape's lengths."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.repeats = args.repeats
        self.scale = 1 if args.shape == "8b" else 8
        self.block = 256 // self.scale
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        config = ms.models.HybridConfig(pattern=PATTERN[: args.layers], dtype=dtype, **SHAPES[args.shape])
        self.model = ms.models.HybridLM(config, seed=0, device=self.device)
        self._draw = random.Random(0)

    def tokens(self, length: int) -> list[int]:
        return [self._draw.randrange(self.model.config.vocab_size) for _ in range(length)]

    def engine(self, rows: int, length: int, graphs: int | None) -> ms.DynamicInferenceEngine:
        """For `rows` requests of at most `length` tokens."""
        blocks = -(-length // self.block)
        config = ms.InferenceConfig(
            block_size_tokens=self.block,
            max_requests=rows,
            max_tokens=max(4096 // self.scale, rows),
            max_sequence_length=length,
            num_kv_blocks=rows * blocks,
            num_mamba_slots=max(20, 2 * rows),
            num_cuda_graphs=graphs,
            use_cuda_graphs_for_non_decode_steps=False,
        )
        return ms.DynamicInferenceEngine(self.model, config)

    def time_ms(self, call: Callable[[], object]) -> float:
        """On a GPU between two events, so the device's time."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - started)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    @torch.inference_mode()
    def prefill(self) -> dict[str, float]:
        """Milliseconds of one forward with a state every block, and without any inside."""
        length = 4096 // self.scale
        context = self.engine(1, length + self.block, None).context
        plan = ms.CheckpointPlan(prefill_interval=self.block)
        prompt = self.tokens(length + 1)[:length]
        request = DynamicInferenceRequest(
            0, prompt, ms.SamplingParams(), plan, PrefixHashChain(self.block), 0.0
        )
        chunk = context.schedule(request, length)
        assert chunk is not None
        stored = context.begin_step([chunk]).inputs
        states = len(stored.checkpoints.rows)
        chunks = replace(stored.chunks, destinations=torch.full_like(stored.chunks.destinations, -1))
        none = replace(
            stored.checkpoints,
            rows=stored.checkpoints.rows[:0],
            token_ends=stored.checkpoints.token_ends[:0],
            destinations=stored.checkpoints.destinations[:0],
        )
        plain = replace(stored, chunks=chunks, checkpoints=none)
        for inputs in (stored, plain, stored, plain):
            self.model(inputs)
        times: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(self.repeats):
            times["with"].append(self.time_ms(lambda: self.model(stored)))
            times["without"].append(self.time_ms(lambda: self.model(plain)))
        again = [self.time_ms(lambda: self.model(plain)) for _ in range(self.repeats)]
        context.abort_step()
        medians = {name: statistics.median(values) for name, values in times.items()}
        return medians | {"without_again": statistics.median(again), "states": states, "tokens": length}

    def decode_steps(
        self, engine: ms.DynamicInferenceEngine, prompt: int, plan: ms.CheckpointPlan, steps: int
    ) -> Iterator[float]:
        """Milliseconds of each of `steps` decode steps of all of an engine's rows, prefilled before."""
        rows = engine.config.max_requests
        sampling = ms.SamplingParams(num_tokens_to_generate=steps + MARGIN)
        for index in range(rows):  # boundaries fall evenly over the steps
            engine.add_request(
                self.tokens(prompt - index * self.block // rows), sampling, checkpoint_plan=plan
            )
        while len(engine.context.requests) < rows or engine.context.batch_dimensions.prefill_req_count:
            engine.step()
        for _ in range(4):  # captures
            engine.step()
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            yield 1e3 * (time.perf_counter() - started)
        engine.reset()

    def rolling(self) -> dict[str, float]:
        """Milliseconds of a decode step of 32 requests, over whole blocks of steps."""
        rows, prompt, steps = 32, 1024 // self.scale, self.block
        engine = self.engine(rows, prompt + steps + MARGIN, 8)
        plans = {name: ms.CheckpointPlan(decode=name) for name in ("rolling", "off")}
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(3):
            for name, plan in plans.items():
                times[name].append(statistics.fmean(self.decode_steps(engine, prompt, plan, steps)))
        return {name: statistics.median(values) for name, values in times.items()}

    def graphs(self, rows: int) -> dict[str, float]:
        prompt, steps = 1024 // self.scale, 40
        medians = {}
        for name, graphs in (("eager", None), ("graph", 8)):
            engine = self.engine(rows, prompt + steps + MARGIN, graphs)
            times = list(self.decode_steps(engine, prompt, ms.CheckpointPlan(), steps))
            medians[name] = statistics.median(times)
        return medians


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the model (default: %(default)s)")
    add_count(parser, "--layers", len(PATTERN), "only the first layers")
    add_device(parser, "cuda")
    add_count(parser, "--repeats", 15, "timed prefills of each")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU (or --shape tiny --device cpu)")
        return
    torch.set_num_threads(1)
    started = time.perf_counter()
    bench = Bench(args)
    layers = len(bench.model.config.pattern)
    weights = sum(p.numel() for p in bench.model.parameters()) / 1e9
    state = bench.model.state_spec().state_bytes / 2**20
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else platform.machine()
    print(f"{name}: {args.shape}, {layers} layers, {weights:.2f} B weights, state {state:.1f} MiB")

    prefill = bench.prefill()
    cost = prefill["with"] / prefill["without"] - 1
    spread = abs(prefill["without_again"] / prefill["without"] - 1)
    print(
        f"prefill of {prefill['tokens']:,.0f} tokens: {prefill['without']:9.3f} ms; storing "
        f"{prefill['states']:.0f} states {prefill['with']:9.3f} ms: {cost:+.2%} "
        f"(without, again: {spread:.2%} off)"
    )
    rolling = bench.rolling()
    rolling_cost = rolling["rolling"] / rolling["off"] - 1
    print(
        f"decode of 32 requests: {rolling['off']:9.3f} ms a step; with rolling states "
        f"{rolling['rolling']:9.3f} ms: {rolling_cost:+.2%}"
    )
    graphs = {rows: bench.graphs(rows) for rows in (1, 8, 32)}
    for rows, times in graphs.items():
        print(
            f"decode of {rows:2} requests: eager {times['eager']:9.3f} ms a step, "
            f"graph {times['graph']:9.3f} ms: {times['eager'] / times['graph']:.2f}x"
        )
    met = {"checkpoints < 1 %": cost < MOST, "rolling states < 1 %": rolling_cost < MOST}
    for requirement, is_met in met.items():
        print(f"  {'met' if is_met else 'NOT MET':8}{requirement}")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if args.json is not None:
        document = {
            "benchmark": "gpu_serving",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": name,
            "torch": torch.__version__,
            "shape": args.shape,
            "layers": layers,
            "prefill_ms": prefill,
            "decode_rolling_ms": rolling,
            "decode_graph_ms": graphs,
            "requirements": met,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
