"""mambaslots' side of the comparison. One model a process.

python benchmarks/vllm_peer/ours_side.py --model Nemotron-H-8B
python benchmarks/vllm_peer/ours_side.py --model Qwen3.5-4B --tiny --device cpu      (to see that it runs)
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import common

HERE = Path(__file__).parent
NARROW = {
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 512, "mamba_num_heads": 8, "n_groups": 2,
    "mamba_head_dim": 16, "ssm_state_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
BLOCK = 256


def build(name, device, tiny):
    """As benchmarks/real_models.py builds it: transformers' config, random weights as before a training."""
    import torch
    from mambaslots.hf import architectures
    from mambaslots.hf.served_model import ServedModel
    from transformers import AutoConfig

    values = json.loads((HERE / "models" / name / "config.json").read_text())
    text = values.get("text_config", values)
    if tiny:
        text["num_hidden_layers"] = 8
        if "hybrid_override_pattern" in text:
            text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:8]
        text |= {field: size for field, size in NARROW.items() if field in text}
        if "rope_parameters" in text:
            text["rope_parameters"]["mrope_section"] = [3, 3, 2]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = architectures.skeleton(AutoConfig.for_model(**values), dtype).to_empty(device=device)
    architectures.restore_buffers(model, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)
    model.tie_weights()
    return ServedModel(model.eval().requires_grad_(False))


class Ours(common.Side):
    name = "mambaslots"

    def __init__(self, model, device, size, *, caching=True, invariant=False, args=None):
        import mambaslots as ms

        self.ms, self.device, self.size = ms, device, size
        config = ms.InferenceConfig(
            block_size_tokens=BLOCK,
            max_requests=size["max_seqs"],
            max_tokens_per_step=size["max_tokens"],
            max_sequence_length=size["max_len"],
            num_kv_blocks=args.blocks,
            num_mamba_slots=args.slots if caching else None,
            enable_prefix_caching=caching,
            num_cuda_graphs=args.graphs if device.type == "cuda" else None,
            batch_invariant=invariant,
        )
        begun = time.perf_counter()
        self.engine = ms.DynamicInferenceEngine(model, config)
        print(f"# engine in {time.perf_counter() - begun:.1f} s", flush=True)
        print("# " + str(self.engine.context.memory.summary()).replace("\n", "\n# "), flush=True)
        print("# " + str(self.engine.describe()).replace("\n", "\n# "), flush=True)
        self.results = {}

    def add(self, tokens, count, logprobs=False):
        sampling = self.ms.SamplingParams(max_tokens=count, return_log_probs=logprobs)
        return self.engine.add_request(tokens, sampling)

    def step(self):
        report = self.engine.step()
        for result in report.finished:
            self.results[result.request_id] = result
        return {request: [one.token for one in tokens] for request, tokens in report.tokens.items()}

    def busy(self):
        return self.engine.has_unfinished_requests()

    def result(self, request):
        result = self.results.pop(request)
        return list(result.tokens), result.log_probs, result.num_resumed_tokens

    def cancel(self, ids):
        for request in ids:
            if request not in self.results:
                self.engine.cancel(request)
            self.results.pop(request, None)
        self.drain()

    def reset(self):
        self.engine.reset_prefix_cache()

    def recover(self):
        self.engine.reset()

    def sync(self):
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=common.VOCABULARY, required=True)
    parser.add_argument("--parts", nargs="+", choices=common.PARTS, help="(default: the model's)")
    parser.add_argument("--off", action="store_true", help="conversations with the cache off, afterwards")
    parser.add_argument("--invariant", action="store_true", help="the parts with batch_invariant")
    parser.add_argument("--blocks", type=int, help="(default: 2,800; 592 for the large model)")
    parser.add_argument("--slots", type=int, help="(default: 128; 16 for the large model)")
    parser.add_argument("--graphs", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cpu":
        sys.modules["fla"] = None
    size = common.size_of(args.model, args.tiny)
    blocks, slots = (80, 16) if args.tiny else (592, 16) if args.model == common.LARGE else (2800, 128)
    args.blocks, args.slots = args.blocks or blocks, args.slots or slots
    args.parts = args.parts or common.parts_of(args.model)
    model = build(args.model, device, args.tiny)
    labels = {"tiny": True} if args.tiny else {}
    labels["invariant"] = args.invariant
    side = Ours(model, device, size, invariant=args.invariant, args=args)
    common.measure(side, Ours.name, args.model, args.parts, size, caching=True, **labels)
    if args.off:
        del side
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        side = Ours(model, device, size, caching=False, invariant=args.invariant, args=args)
        common.measure(side, Ours.name, args.model, ("conversations",), size, caching=False, **labels)
    if device.type == "cuda":
        print(f"# peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
