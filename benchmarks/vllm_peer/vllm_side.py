"""vLLM's side of the comparison. One engine a process: run again with --off, --mode all, --invariant.

python benchmarks/vllm_peer/vllm_side.py --model Nemotron-H-8B       (needs vllm 0.26)
python benchmarks/vllm_peer/vllm_side.py --model Qwen3.5-4B --check   (no GPU: the configuration)
"""

import argparse
import math
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import common

HERE = Path(__file__).parent


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=common.VOCABULARY, required=True)
    parser.add_argument("--parts", nargs="+", choices=common.PARTS, help="(default: the model's)")
    parser.add_argument("--off", action="store_true", help="prefix caching off; conversations only")
    parser.add_argument("--invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1; bits only")
    parser.add_argument(
        "--mode", choices=("default", "align", "all"), default="default", help="mamba_cache_mode"
    )
    parser.add_argument("--gdn", choices=("triton", "flashinfer", "default"), default="triton")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--capture", nargs="+", type=int, help="cudagraph_capture_sizes (default: vLLM's)")
    parser.add_argument("--memory", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--dummy", action="store_true", help="keep vLLM's dummy weights as they are")
    parser.add_argument("--check", action="store_true", help="build the configuration only")
    args = parser.parse_args()
    args.parts = args.parts or common.parts_of(args.model)
    return args


def settings(args):
    size = common.size_of(args.model)
    values = {
        "model": str(HERE / "models" / args.model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "gpu_memory_utilization": args.memory,
        "max_num_seqs": size["max_seqs"],
        "max_model_len": size["max_len"],
        "max_num_batched_tokens": size["max_tokens"],
        "enable_prefix_caching": not args.off,
        "enforce_eager": args.eager,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "seed": 0,
    }
    if args.mode != "default" and not args.off:
        values["mamba_cache_mode"] = args.mode
    if args.model.startswith("Qwen"):
        values["language_model_only"] = True
        if args.gdn != "default":
            values["gdn_prefill_backend"] = args.gdn
    if args.capture:
        values["compilation_config"] = {"cudagraph_capture_sizes": args.capture}
    return values


class Peer(common.Side):
    name = "vllm"

    def __init__(self, args):
        from vllm import LLM

        begun = time.perf_counter()
        self.llm = LLM(**settings(args))
        self.engine = self.llm.llm_engine
        print(f"# engine in {time.perf_counter() - begun:.1f} s", flush=True)
        self.count = 0
        self.outputs, self.done = {}, {}

    def add(self, tokens, count, logprobs=False):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        request = str(self.count)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=0, ignore_eos=True, detokenize=False,
            logprobs=1 if logprobs else None, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.outputs[request] = ([], [], [0])
        self.engine.add_request(request, {"prompt_token_ids": list(tokens)}, sampling)
        return request

    def step(self):
        new = {}
        for output in self.engine.step():
            request = output.request_id
            if request not in self.outputs:
                continue
            tokens, log_probs, cached = self.outputs[request]
            if output.num_cached_tokens:
                cached[0] = max(cached[0], output.num_cached_tokens)
            for answer in output.outputs:
                fresh = list(answer.token_ids)
                if fresh:
                    new[request] = fresh
                    tokens += fresh
                if answer.logprobs:
                    log_probs += [
                        each[token].logprob for token, each in zip(fresh, answer.logprobs, strict=True)
                    ]
        return new

    def busy(self):
        return self.engine.has_unfinished_requests()

    def result(self, request):
        tokens, log_probs, cached = self.outputs.pop(request)
        return tokens, log_probs, cached[0]

    def cancel(self, ids):
        self.engine.abort_request(list(ids))
        self.drain()
        for request in ids:
            self.outputs.pop(request, None)

    def reset(self):
        for _ in range(20):
            if self.engine.reset_prefix_cache():
                return
            self.engine.step()
            self.sync()
        print("# reset_prefix_cache was refused", flush=True)

    def recover(self):
        self.cancel(list(self.outputs))

    def sync(self):
        import torch

        torch.cuda.synchronize()

    def model(self):
        worker = self.engine.model_executor.driver_worker
        try:
            return worker.get_model()
        except AttributeError:
            return worker.model_runner.model


def draw_weights(model):
    """Random weights like those of transformers before a training, in place of 1e-3 everywhere."""
    import torch

    torch.manual_seed(0)
    other = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            numbers = torch.arange(1, weight.shape[0] + 1, device=weight.device, dtype=torch.float32)
            if last == "A":  # of Mamba-2, as its loader leaves it
                new = -numbers
            elif last == "A_log":
                new = torch.empty_like(numbers).uniform_(0.01, 16).log()
            elif last == "dt_bias" and "linear_attn" in name:
                new = torch.ones_like(numbers)
            elif last == "dt_bias":
                step = torch.exp(torch.rand_like(numbers) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
                new = step + torch.log(-torch.expm1(-step))
            elif last == "D":
                new = torch.ones_like(numbers)
            elif "conv1d" in name and last == "weight":
                new = torch.empty_like(weight, dtype=torch.float32).uniform_(-0.5, 0.5)
            elif last == "bias":
                new = torch.zeros_like(weight)
            elif weight.dim() == 1:
                zero = "Gemma" in type(owner(model, name)).__name__  # 1 + weight
                new = torch.zeros_like(weight) if zero else torch.ones_like(weight)
                other[type(owner(model, name)).__name__] = "0" if zero else "1"
            else:
                weight.normal_(0.0, 0.02)
                continue
            weight.copy_(new.reshape(weight.shape))
    print(f"# weights drawn; norms: {other}", flush=True)


def owner(model, name):
    for part in name.split(".")[:-1]:
        model = getattr(model, part)
    return model


def main():
    args = arguments()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(tempfile.gettempdir(), "peer_vllm_cache"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    if args.invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if args.check:
        from vllm import EngineArgs

        config = EngineArgs(**settings(args)).create_engine_config()
        print(config.model_config.architecture, config.cache_config, config.scheduler_config.async_scheduling)
        return config
    labels = {"caching": not args.off, "mode": args.mode, "invariant": args.invariant, "gdn": args.gdn}
    try:
        side = Peer(args)
    except BaseException:
        text = traceback.format_exc()
        print(text[-6000:], flush=True)
        common.emit(Peer.name, args.model, "engine", failed=text[-700:], **labels)
        sys.exit(1)
    try:
        cache = side.engine.vllm_config.cache_config
        common.emit(
            Peer.name, args.model, "engine", **labels, block_size=cache.block_size,
            mamba_block_size=cache.mamba_block_size,
            mamba_cache_mode=cache.mamba_cache_mode, num_gpu_blocks=cache.num_gpu_blocks,
            ssm_dtype=str(cache.mamba_ssm_cache_dtype),
            async_scheduling=side.engine.vllm_config.scheduler_config.async_scheduling,
            cudagraph_mode=str(side.engine.vllm_config.compilation_config.cudagraph_mode),
        )  # fmt: skip
    except Exception:
        traceback.print_exc()
    if not args.dummy:
        try:
            draw_weights(side.model())
        except Exception:
            traceback.print_exc()
    parts = ("conversations",) if args.off else ("bits",) if args.invariant else args.parts
    common.measure(side, Peer.name, args.model, parts, common.size_of(args.model), **labels)


if __name__ == "__main__":
    main()
