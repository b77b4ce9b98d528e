"""The calls that all ranks of a split model make, as a rank makes them that another rank leads.

Beside `LeadingEngine`, this is the one file outside `inference/engines/` that reaches into an engine's books.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ...inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ...inference.contexts.cache.hashing import PrefixHashChain
from ...inference.contexts.request import DynamicInferenceRequest
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...request import FinishReason, SamplingParams


class FollowedCalls:
    """Makes on this rank what a leading rank calls. Each public method has the name of a call of
    `DynamicInferenceEngine._apply`.

    The leading rank has checked the arguments and has put its books in order. Nobody waits for results here:
    all requests are as if they had an owner, and no step is reported.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        """`engine`: of this rank. Until `close`, requests end here only where the leading rank ends them."""
        self._engine = engine
        self._state = engine._state
        engine._cancels = False

    def close(self) -> None:
        """Let this rank make its calls itself again."""
        self._engine._cancels = True

    def add(
        self,
        request_id: int,
        prompt: list[int],
        sampling: SamplingParams,
        plan: CheckpointPlan,
        root: bytes,
        seed: int,
        next_token: int | None,
        given_tokens: list[int],
    ) -> None:
        """Queue a request; the arguments are those of `asked_of`."""
        hashes = PrefixHashChain(self._engine.config.block_size_tokens, root)
        if self._engine.config.enable_prefix_caching:
            hashes.extend_to([*prompt, *given_tokens])
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=prompt,
            sampling=sampling,
            plan=plan,
            hashes=hashes,
            arrival_s=time.perf_counter(),
            seed=seed,
            next_token=next_token,
            given_tokens=given_tokens,
            owned=True,
        )
        self._engine._on_add(request)

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request between two steps."""
        self._engine._on_end(request_id, reason)
        self._state.observers.notify_ended()

    def step(self) -> None:
        """Make a step."""
        self._state.check_usable("step")
        self._engine._on_step()
        self._state.observers.notify_ended()

    def pin(self, root: bytes, blocks: list[bytes]) -> None:
        """Pin the prefix of these blocks; `root` and `blocks` are those of its `PrefixHashChain`."""
        chain = PrefixHashChain(self._engine.config.block_size_tokens, root)
        for content in blocks:
            chain.append(content)
        self._engine._on_pin(chain)

    def unpin(self, number: int) -> None:
        """Unpin the prefix of this number in the order of `DynamicInferenceEngine.pins`."""
        self._engine._on_unpin(number)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and pin."""
        self._engine.reset_prefix_cache()

    def set_weights_version(self, version: object) -> None:
        """Name the weights, and forget every cached prefix, whatever the name was before."""
        self._engine._on_set_weights_version(version)

    def suspend(self) -> None:
        """Free the memory of all pools."""
        self._engine.suspend()

    def resume(self) -> None:
        """Allocate the pools again."""
        self._engine.resume()

    def reset(self, weights_version: object, allocated: bool) -> None:
        """Reset the engine, and make right in what a call that only one rank made may have differed.

        Args:
            weights_version, allocated: those of the leading rank's engine.
        """
        self._engine._on_reset(weights_version, allocated)

    def run(
        self, function: Callable[..., object], arguments: tuple[object, ...], ids: tuple[int, int]
    ) -> None:
        """Call `function(engine, *arguments)`.

        `ids`: the next ids of requests, of those with a seed and of those without.
        """
        state, engine = self._state, self._engine
        engine._new_ids, engine._ids_without_seed = count(ids[0]), count(ids[1], -1)
        try:
            function(engine, *arguments)
        finally:
            state.abandoned.clear()  # the leading rank ends what its leases have left
            state.unclaimed.clear()
            state.reports.clear()

    @property
    def broken(self) -> bool:
        """Whether a call has failed here, so that only `reset` is of use."""
        return self._state.broken_by is not None


def followed_arguments(call: str, arguments: tuple[Any, ...]) -> tuple[object, ...]:
    """The arguments of the method of `FollowedCalls`, for a call of `DynamicInferenceEngine._apply`."""
    if call == "step":
        return ()
    if call == "pin":
        return arguments[0].root, arguments[0].tokens
    if call == "add":
        return asked_of(arguments[0])
    return arguments


def asked_of(request: DynamicInferenceRequest) -> tuple[object, ...]:
    """The arguments of `FollowedCalls.add` for an equal request on another rank; the salt is not in them."""
    return (
        request.request_id, request.prompt_tokens, request.sampling, request.plan, request.hashes.root,
        request.seed, request.next_token, request.given_tokens,
    )  # fmt: skip
