"""What do penalties cost a step of 128 decodes at a vocabulary of 248,320?

Draws tokens from the same logits without and with penalties, min_p and biases, in turns; prints the time of
the draw, host and device, compared with a decode step of Qwen3.5-4B's size (--step-ms; of an H200).

    python benchmarks/logits_changes.py --device cuda
    python benchmarks/logits_changes.py --rows 4 --vocabulary 5000          (that it runs, on a CPU)
"""

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from support.command_line import add_count, add_device, check_device, make_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from mambaslots.inference.contexts.dynamic_request import ScheduledRequest

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "with penalties": {"repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": 0.1},
    "with min_p": {"min_p": 0.05},
    "with all": {
        "repetition_penalty": 1.05, "presence_penalty": 1.5, "min_p": 0.05, "min_tokens": 4,
        "logit_bias": {5: 1.0}, "stop_token_ids": (7,),
    },
}  # fmt: skip


def main() -> None:
    """Print a line for each setting."""
    parser = make_parser(__doc__)
    add_device(parser, "cpu")
    add_count(parser, "--rows", 128, "requests of a step")
    add_count(parser, "--vocabulary", 248_320, "tokens")
    add_count(parser, "--steps", 30, "of each setting")
    parser.add_argument("--step-ms", type=float, default=11.7, help="of a decode (default: %(default)s)")
    options = parser.parse_args()
    check_device(parser, options.device)
    import torch
    from mambaslots.inference.engines.logits_changes import LogitsChanges
    from mambaslots.inference.engines.step_runner import SampledStep

    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(options.rows, options.vocabulary, generator=generator, device=device).bfloat16()
    changes = {name: LogitsChanges(device) for name in SETTINGS}
    steps = {name: _steps(options.rows, settings) for name, settings in SETTINGS.items()}
    best = dict.fromkeys(SETTINGS, float("inf"))
    for number in range(options.steps):
        for name in SETTINGS:
            _wait(device)
            begun = time.perf_counter()
            sampled = SampledStep(steps[name], logits, changes[name])
            _wait(device)
            took = time.perf_counter() - begun
            sampled.append_tokens()
            steps[name] = [_next(step) for step in steps[name]]
            if number >= 3:  # before that, kernels are compiled and memory is allocated
                best[name] = min(best[name], took)
    plain = best["temperature"]
    for name, seconds in best.items():
        more = 1e3 * (seconds - plain)
        print(
            f"{name:>15}: {1e3 * seconds:7.3f} ms a draw of {options.rows} rows, {more:+.3f} ms, "
            f"{100 * more / options.step_ms:+.1f} % of a step of {options.step_ms} ms",
            flush=True,
        )


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _steps(rows: int, settings: dict[str, Any]) -> "Sequence[ScheduledRequest]":
    """A decode of each request, whose prompt has 1,000 tokens."""
    import mambaslots as ms
    from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
    from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest

    params = ms.SamplingParams(max_tokens=4096, temperature=0.7, top_p=0.95, **settings)
    prompts = [[(7 * i + row) % 4000 for i in range(1000)] for row in range(rows)]
    requests = [
        DynamicInferenceRequest(row, prompt, params, ms.CheckpointPlan(), PrefixHashChain(64), 0.0, seed=row)
        for row, prompt in enumerate(prompts)
    ]
    return [_decode(request) for request in requests]


def _decode(request: Any) -> "ScheduledRequest":
    from mambaslots.inference.contexts.dynamic_request import ScheduledRequest

    nothing: Any = SimpleNamespace(path=None)
    length = len(request.tokens)
    return ScheduledRequest(
        nothing.path, request.tokens, length - 1, length, decoding=True, request=request, allocation=nothing
    )


def _next(scheduled: "ScheduledRequest") -> "ScheduledRequest":
    return _decode(scheduled.request)


if __name__ == "__main__":
    main()
