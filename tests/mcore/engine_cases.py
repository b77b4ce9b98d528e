"""What is asked of megatron-core's engine, with a cache or without: a case serves requests and returns them.

`make` builds an engine of the case's sizes. A case is a pure function of it: the same prompts, whichever
cache there is. What a cache may change is `num_resumed_tokens`, and nothing else. The answers to compare with
are those of an engine without a cache that prefills whole prompts: stock's chunks lose a convolution
window, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from mcore_rig import BLOCK, Served, add, finish, serve, step
from megatron.core.inference import config as host_config

Make = Callable[..., Any]
CASES: dict[str, Callable[[Make], list[Served]]] = {}


def case(run: Callable[[Make], list[Served]]) -> Callable[[Make], list[Served]]:
    CASES[run.__name__] = run
    return run


def tokens(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(256), k=length)


def serve_together(
    engine: Any, prompts: list[list[int]], new_tokens: int = 4, *, hashed: bool = True
) -> list[Served]:
    numbers = [add(engine, prompt, new_tokens, hashed=hashed) for prompt in prompts]
    done = finish(engine)
    return [done[number] for number in numbers]


@case
def a_repeat(make: Make) -> list[Served]:
    """Of a prompt that ends within a block, and of one that ends with it; then longer ones."""
    within, at_end = tokens(2 * BLOCK + 20, 1), tokens(2 * BLOCK, 2)
    more = tokens(BLOCK + 5, 3)
    return serve(make(), [within, at_end, within, at_end, at_end + more, within + more])


@case
def a_length_of_1_mod_block(make: Make) -> list[Served]:
    prompt = tokens(2 * BLOCK + 1, 4)
    return serve(make(), [prompt] * 3)


@case
def a_continuation_chunk_with_kv_but_no_state(make: Make) -> list[Served]:
    """The last prompt shares blocks with the first, whose states have given way to those of others."""
    engine = make(num_mamba_slots=4, max_tokens=2 * BLOCK, enable_chunked_prefill=True)
    first = tokens(6 * BLOCK + 10, 5)
    others = [tokens(BLOCK + 3, 120 + i) for i in range(4)]
    return serve(engine, [first, *others, first[: 5 * BLOCK + 3] + tokens(7, 6)], new_tokens=2)


@case
def a_suffix_of_2_tokens(make: Make) -> list[Served]:
    """After a restored prefix, and as the last chunk of a prompt: shorter than the convolution."""
    prefix = tokens(2 * BLOCK, 7)
    engine = make(max_tokens=2 * BLOCK, enable_chunked_prefill=True)
    return serve(engine, [prefix, prefix + tokens(2, 8), tokens(2 * BLOCK + 2, 9), prefix + tokens(1, 10)])


@case
def a_pool_of_2_slots(make: Make) -> list[Served]:
    prompts = [tokens(3 * BLOCK + 7 * i, 20 + i) for i in range(3)]
    together = [tokens(2 * BLOCK + 9, 30 + i) for i in range(4)]
    engine = make(num_mamba_slots=2)
    served = serve(engine, [*prompts, *prompts])
    return served + serve_together(engine, together) + serve(engine, [together[-1], together[-1]])


@case
def an_evictor_in_between(make: Make) -> list[Served]:
    """So few KV blocks that each long prompt evicts the others' blocks, and with them their states."""
    engine = make(num_kv_blocks=12)
    shared = tokens(3 * BLOCK, 40)
    prompts = [shared + tokens(25, 41 + i) for i in range(2)]
    evictor = tokens(9 * BLOCK, 45)
    return serve(engine, [*prompts, evictor, *prompts, evictor, prompts[1]])


@case
def turn_on_turn(make: Make) -> list[Served]:
    """A conversation: each prompt is what was said and answered before, and something new."""
    engine = make(max_tokens=4 * BLOCK, enable_chunked_prefill=True)
    said = tokens(BLOCK - 7, 50)
    served = []
    for turn in range(4):
        served += serve(engine, [said], new_tokens=BLOCK + 9)
        said = said + served[-1].tokens + tokens(5, 51 + turn)
    return served


@contextmanager
def other_weights(model: torch.nn.Module) -> Iterator[None]:
    """As after a training step, and back."""
    mixer = model.decoder.layers[0].mixer
    kept = mixer.dt_bias.detach().clone()
    try:
        with torch.no_grad():
            mixer.dt_bias.add_(1.0)
        yield
    finally:
        with torch.no_grad():
            mixer.dt_bias.copy_(kept)


@case
def suspend_and_resume(make: Make) -> list[Served]:
    """Weights change while the engine is suspended; a request was under way, and the memory is given up."""
    served = []
    modes = host_config.KVCacheManagementMode
    for mode in (modes.RECOMPUTE, modes.OFFLOAD):
        engine = make(kv_cache_management_mode=mode)
        prompt, under_way = tokens(2 * BLOCK + 9, 70), tokens(BLOCK + 3, 71)
        served += serve(engine, [prompt, prompt])
        number = add(engine, under_way, new_tokens=6)
        done = step(engine) | step(engine)
        engine.suspend()
        engine.resume()
        done |= finish(engine)
        served += [done[number], *serve(engine, [prompt, under_way])]
    engine = make()
    served += serve(engine, [prompt[: BLOCK + 5]])
    with other_weights(engine.controller.inference_wrapped_model.model):
        engine.context.reset_metadata()  # what resuming does where it keeps its addresses (unified memory)
        served += serve(engine, [prompt, prompt[: BLOCK + 9]])
    return served


@case
def several_at_once(make: Make) -> list[Served]:
    """In chunks, some with a prefix in common, more than there are rows; twice, and again asynchronously."""
    modes = [{}, {"async_sched_mode": host_config.AsyncScheduleMode.ASYNC}]
    shared = tokens(2 * BLOCK, 80)
    prompts = [
        shared + tokens(30, 81),
        tokens(5 * BLOCK + 4, 82),
        shared + tokens(3 * BLOCK, 83),
        tokens(20, 84),
        shared + tokens(1, 85),
        tokens(3 * BLOCK, 86),
    ]
    served = []
    for mode in modes:
        engine = make(max_tokens=3 * BLOCK, enable_chunked_prefill=True, **mode)
        for _ in range(2):
            served += serve_together(engine, prompts)
    return served


@case
def pause_and_evict(make: Make) -> list[Served]:
    """The answers need more KV blocks than there are: requests pause, are evicted, and start again."""
    engine = make(num_kv_blocks=9)
    prompts = [tokens(2 * BLOCK - 3 - 2 * i, 90 + i) for i in range(4)]
    served = serve_together(engine, prompts, new_tokens=BLOCK + 12)
    assert engine.evicted_request_count > 0
    return served + serve_together(engine, prompts[:2], new_tokens=BLOCK + 12)


@case
def requests_without_hashes(make: Make) -> list[Served]:
    """They find nothing, and take no state: the two slots stay those of the others."""
    engine = make(num_mamba_slots=2)
    hashed, plain = tokens(2 * BLOCK + 7, 100), [tokens(3 * BLOCK + 8, 101 + i) for i in range(2)]
    served = serve(engine, [hashed])
    served += serve_together(engine, plain, hashed=False)
    return served + serve(engine, [hashed]) + serve(engine, plain, hashed=False)


@case
def memory_only(make: Make) -> list[Served]:
    """No budget for states: KV is shared, and every token is computed."""
    engine = make(num_mamba_slots=None, max_tokens=2 * BLOCK, enable_chunked_prefill=True)
    prompt = tokens(5 * BLOCK + 5, 110)
    return serve(engine, [prompt, prompt, prompt[: 4 * BLOCK + 1]])
