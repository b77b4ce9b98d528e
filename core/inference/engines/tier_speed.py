"""From how many tokens on a copy of a state is cheaper than to compute them; measured at start."""

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from ...config import InferenceConfig
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX
from ..contexts.cache.tier import HostTier
from ..contexts.tier_copies import HostCopies
from .dummy_steps import DummySteps
from .model import Model

_SHORT, _LONG = 32, 256  # tokens of the two prefills that are compared
_REPETITIONS = 3


def set_min_tokens(tier: HostTier, model: Model, spec: HybridStateSpec, config: InferenceConfig) -> None:
    """Set `tier.min_tokens` and `min_tokens_from_file` from the time of a copy and of a prefill.

    The time of a token is what a longer prefill takes beyond a shorter one, over its additional tokens. The
    slowest copy and the fastest prefill of all ranks count. Where memory for a prefill is short, every copy
    counts as cheaper.

    A collective: all ranks of `spec.groups` make this call, before the engine serves anything. Synchronises,
    and writes to the tier's first slot and file.
    """
    from_host = from_file = 0.0  # of a pipeline stage without states
    if isinstance(tier.copies, HostCopies):
        from_host, from_file = tier.copies.seconds_to_fetch(bool(tier.files.num_slots), _best_of)
    token_s = _seconds_of_a_token(model, spec, config)
    ranks = spec.groups.gather((from_host, from_file, token_s), spec.device)
    token_s = min(rank[2] for rank in ranks)
    tier.min_tokens, tier.min_tokens_from_file = (
        _tokens_in(max(rank[place] for rank in ranks), token_s) for place in (0, 1)
    )


def _tokens_in(seconds: float, token_s: float) -> int:
    if not 0.0 < token_s < math.inf:
        return 1
    return min(INT32_MAX, max(1, math.ceil(seconds / token_s)))


def _best_of(work: Callable[[], object]) -> float:
    """Seconds that `work`, which synchronises, takes at best."""
    taken = []
    for _ in range(_REPETITIONS):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _seconds_of_a_token(model: Model, spec: HybridStateSpec, config: InferenceConfig) -> float:
    """Seconds that a token more adds to a prefill; infinite where that cannot be measured."""
    long = min(_LONG, config.max_sequence_length - 1)
    short = max(1, long * _SHORT // _LONG)
    if long <= short:
        return math.inf
    try:
        steps = DummySteps(model, spec, config, long + 1)
        times = []
        for length in (short, long):
            tokens = steps.tokens(length)
            _prefill(steps, spec, tokens)  # compiles kernels
            times.append(_best_of(partial(_prefill, steps, spec, tokens)))
    except torch.OutOfMemoryError:
        return math.inf
    return max(0.0, times[1] - times[0]) / (long - short)


def _prefill(steps: DummySteps, spec: HybridStateSpec, tokens: list[int]) -> None:
    request = steps.request(tokens)
    steps.run([(request, len(tokens))], lambda shape: shape)
    steps.release(request)
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
