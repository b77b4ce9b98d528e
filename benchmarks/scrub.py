"""What does `free_memory="zero"` cost? Two engines serve the same prompts; only one zeroes what is left.

Each round has twelve new prompts, more than the pools hold, so that memory changes its owner all the time.
Rounds of both engines alternate, and the fastest of each counts: CPU time on a CPU, else the clock's.

    python benchmarks/scrub.py                      (the figures in the docs are of --rounds 6)
    python benchmarks/scrub.py --device cuda --rounds 6
"""

import time
from typing import TYPE_CHECKING

from support.command_line import add_count, add_device, check_device, make_parser

if TYPE_CHECKING:
    import mambaslots as ms


def main() -> None:
    """Print a line for each engine."""
    parser = make_parser(__doc__)
    add_device(parser, "cpu")
    add_count(parser, "--rounds", 2, "of each engine")
    options = parser.parse_args()
    check_device(parser, options.device)
    import mambaslots as ms
    import torch

    torch.set_num_threads(1)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(dtype), seed=0).to(device)
    graphs = 16 if device.type == "cuda" else None
    engines = {
        scrub: ms.DynamicInferenceEngine(
            model,
            ms.InferenceConfig(
                block_size_tokens=64, max_requests=8, max_tokens_per_step=1024, max_sequence_length=1024,
                num_kv_blocks=64, num_mamba_slots=16, num_cuda_graphs=graphs,
                free_memory="zero" if scrub else "keep",
            ),
        )
        for scrub in (False, True)
    }  # fmt: skip
    for engine in engines.values():
        _seconds(engine, -1)
    times = dict.fromkeys(engines, float("inf"))
    for number in range(options.rounds):
        for scrub, engine in engines.items():
            seconds = _seconds(engine, number)
            times[scrub] = min(times[scrub], seconds)
            print(f"round {number}, scrub {scrub!s:>5}: {1e3 * seconds:.0f} ms", flush=True)
    for scrub, engine in engines.items():
        stats = engine.stats().cache
        print(
            f"scrub {scrub!s:>5}: {1e3 * times[scrub]:.0f} ms a round, "
            f"{stats.num_states_evicted} states evicted; {engine.context.memory.summary().split('; ')[-1]}"
        )
    print(f"ratio {times[True] / times[False]:.3f}")


def _seconds(engine: "ms.DynamicInferenceEngine", number: int) -> float:
    """Of one round."""
    import mambaslots as ms

    clock = time.process_time if engine.context.spec.device.type == "cpu" else time.perf_counter
    prompts = [[(91 * number + 7 * talk + i) % 251 for i in range(300)] for talk in range(12)]
    begin = clock()
    engine.generate(prompts, ms.SamplingParams(max_tokens=24))
    return clock() - begin


if __name__ == "__main__":
    main()
