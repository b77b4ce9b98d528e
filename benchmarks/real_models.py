"""Models of transformers at their full size, with random weights that are drawn on the device.

For each config: a prompt that is computed whole, with a state stored at every block; the same prompt and a
new turn, which resumes; steps that decode several requests, eager and by CUDA graph. And the logits of a
prompt beside those of transformers' own forward, in bfloat16 and in float32.

    python benchmarks/real_models.py --json out.json                  (one GPU; Nemotron-H-8B and Qwen3.5-4B)
    python benchmarks/real_models.py --device cpu --layers 4 --narrow   (does it run?)

Times are medians of whole engine steps by the clock.
"""

import argparse
import datetime
import gc
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
from support.command_line import add_count, add_device, make_parser
from support.no_states import NoStates
from torch import Tensor

CONFIGS = Path(__file__).parents[1] / "tests/unit/hf/configs"
MODELS = ("Nemotron-H-8B", "Qwen3.5-4B")
BLOCK = 256
NARROW = {
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 512, "mamba_num_heads": 8, "n_groups": 2,
    "mamba_head_dim": 16, "ssm_state_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
"""What `--narrow` makes of the sizes of a config, where the config has them."""


def config_of(name: str, num_layers: int | None, narrow: bool) -> Any:
    """The config of a model; of its first layers only."""
    from transformers import AutoConfig

    values = json.loads((CONFIGS / f"{name}.json").read_text())
    text = values.get("text_config", values)
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
        if "hybrid_override_pattern" in text:
            text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:num_layers]
    if narrow:
        text |= {field: size for field, size in NARROW.items() if field in text}
        if "rope_parameters" in text:
            text["rope_parameters"]["mrope_section"] = [3, 3, 2]
    return AutoConfig.for_model(**values)


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of transformers on `device`, with weights as transformers draws them before a training."""
    from mambaslots.hf import architectures

    model: Any = architectures.skeleton(config, dtype).to_empty(device=device)
    architectures.restore_buffers(model, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)
    model.tie_weights()
    return model


@torch.no_grad()
def logits_of_transformers(model: Any, tokens: list[int], device: torch.device) -> Tensor:
    """The logits of the last token, by transformers' own forward; [vocabulary] float32."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([tokens], device=device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    return logits


class Bench:
    """One served model."""

    def __init__(self, name: str, args: argparse.Namespace, dtype: torch.dtype) -> None:
        from mambaslots.hf.served_model import ServedModel

        self.name = name
        self.device = torch.device(args.device)
        self.length = args.tokens
        self.repeats = args.repeats
        self._draw = random.Random(0)
        config = config_of(name, args.layers, args.narrow)
        model = random_model(config, dtype, self.device)
        self._vocabulary = model.config.vocab_size
        self.probe = self.tokens(min(512, args.tokens))
        self._theirs = logits_of_transformers(model, self.probe, self.device)
        self.model = ServedModel(model)
        self.weights_gb = sum(p.numel() * p.itemsize for p in model.parameters()) / 2**30
        self.spec = self.model.state_spec()

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]

    def engine(self, rows: int, length: int, graphs: int | None) -> ms.DynamicInferenceEngine:
        """For `rows` requests of at most `length` tokens."""
        config = ms.InferenceConfig(
            block_size_tokens=BLOCK,
            max_requests=rows,
            max_tokens_per_step=max(self.length, rows),
            max_sequence_length=length,
            num_kv_blocks=rows * -(-length // BLOCK) + 4,
            num_mamba_slots=max(2 * rows, self.length // BLOCK + 4),
            num_cuda_graphs=graphs,
        )
        return ms.DynamicInferenceEngine(self.model, config)

    def parity(self) -> float:
        """The largest difference of the logits from those of transformers, relative to the largest logit."""
        logits: list[Tensor] = []

        def noted(inputs: ms.StepInputs) -> Tensor:
            logits.append(self.model(inputs))
            return logits[-1]

        class Noted:
            state_spec = staticmethod(self.model.state_spec)
            __call__ = staticmethod(noted)

        engine = self.engine(1, self.length + BLOCK, None)
        noting = ms.DynamicInferenceEngine(Noted(), engine.config)
        noting.generate([self.probe], ms.SamplingParams(max_tokens=1))
        difference = (logits[-1][0].float() - self._theirs).abs().max() / self._theirs.abs().max()
        return float(difference)

    def prefill(self) -> list[dict[str, float]]:
        """Milliseconds of a whole prompt, with and without states inside, and of a turn that resumes."""
        rows = []
        engine = self.engine(1, self.length + 4 * BLOCK, None)
        every = ms.CheckpointPlan(prefill_interval=BLOCK)
        none = NoStates()
        one = ms.SamplingParams(max_tokens=1)
        for what, plan in (
            ("whole prompt", every), ("the same, without states", none), ("resumed", every)
        ):  # fmt: skip
            times: list[float] = []
            for _ in range(self.repeats + 1):
                engine.reset()
                prompt = self.tokens(self.length)
                if what == "resumed":
                    engine.generate([prompt], one, checkpoint_plan=plan)
                    prompt += self.tokens(100)
                before = engine.context.cache_stats().num_states_committed
                self._synchronise()
                started = time.perf_counter()
                (result,) = engine.generate([prompt], one, checkpoint_plan=plan)
                times.append(1e3 * (time.perf_counter() - started))
                states = engine.context.cache_stats().num_states_committed - before
            rows.append(
                {
                    "what": what, "tokens": len(prompt), "resumed": result.num_resumed_tokens,
                    "ms": statistics.median(times[1:]), "states": states,
                }
            )  # fmt: skip
        return rows

    def decode(self, num_requests: int) -> list[dict[str, float]]:
        """Milliseconds of a step that decodes one token of each request."""
        rows = []
        steps, prompt = 40, BLOCK
        for what, graphs in (("decode, eager", None), ("decode, by graph", 4)):
            if graphs is not None and self.device.type != "cuda":
                continue
            engine = self.engine(num_requests, prompt + 2 * steps + BLOCK, graphs)
            sampling = ms.SamplingParams(max_tokens=2 * steps)
            for _ in range(num_requests):
                engine.add_request(self.tokens(prompt), sampling)
            while any(len(request.tokens) == prompt for request in engine.context.requests) or (
                len(engine.context.requests) < num_requests
            ):
                engine.step()
            for _ in range(8):  # captures
                engine.step()
            times = []
            before = engine.context.cache_stats().num_states_committed
            for _ in range(steps):
                started = time.perf_counter()
                engine.step()
                times.append(1e3 * (time.perf_counter() - started))
            states = engine.context.cache_stats().num_states_committed - before
            rows.append(
                {
                    "what": what, "tokens": num_requests, "resumed": 0,
                    "ms": statistics.median(times), "states": states,
                }
            )  # fmt: skip
        return rows

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def parity_in_float32(name: str, args: argparse.Namespace) -> float:
    """`Bench.parity` of the model in float32, whose memory is free afterwards."""
    error = Bench(name, args, torch.float32).parity()
    gc.collect()
    if args.device != "cpu":
        torch.cuda.empty_cache()
    return error


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which (default: all)")
    parser.add_argument("--layers", type=int, default=None, help="only the first layers")
    parser.add_argument("--narrow", action="store_true", help="small layers, for a CPU")
    add_count(parser, "--tokens", 4096, "of the prompt, a multiple of 256")
    add_count(parser, "--repeats", 5, "timed prompts of each")
    add_device(parser, "cuda")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU (or --device cpu --layers 4 --narrow --tokens 512)")
        return
    device = torch.device(args.device)
    if device.type == "cpu":  # transformers takes fla wherever it is installed, and fla needs a GPU
        sys.modules["fla"] = None  # type: ignore[assignment]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"{name}, torch {torch.__version__}")
    documents = []
    for model_name in args.models:
        wide = parity_in_float32(model_name, args)
        bench = Bench(model_name, args, torch.bfloat16 if device.type == "cuda" else torch.float32)
        spec, layers = bench.spec, bench.model.config.num_hidden_layers
        print(
            f"\n{model_name}: {layers} layers, weights {bench.weights_gb:.1f} GB, a state "
            f"{spec.state_bytes / 1e6:.1f} MB, KV {spec.kv_block_bytes(1) / 1e3:.0f} kB a token"
        )
        error = bench.parity()
        print(
            f"largest difference from transformers' logits, {len(bench.probe)} tokens, relative to the "
            f"largest: {error:.1e}; in float32 {wide:.1e}"
        )
        rows = bench.prefill() + bench.decode(1) + bench.decode(32)
        print("what                        tokens   resumed         ms   states stored")
        for row in rows:
            print(
                f"{row['what']:26} {row['tokens']:7,} {row['resumed']:9,} {row['ms']:10.2f}"
                f" {row['states']:15}"
            )
        documents.append(
            {
                "model": model_name,
                "layers": layers,
                "state_bytes": spec.state_bytes,
                "parity": error,
                "parity_float32": wide,
                "rows": rows,
            }
        )
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json is not None:
        document = {
            "benchmark": "real_models",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": name,
            "torch": torch.__version__,
            "models": documents,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
