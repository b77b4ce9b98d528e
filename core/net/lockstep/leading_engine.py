"""The engine of a split model for one caller: it makes each call on all ranks."""

import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self

from ...config import InferenceConfig
from ...inference.engines.drafter import Drafter
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.runner import Model
from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, instance, real, shown
from ..heartbeat import Heartbeat
from .followed_calls import followed_arguments
from .leader_calls import LeaderCalls
from .meeting import meet_followers

_open: "weakref.WeakKeyDictionary[LeaderCalls, ParallelGroups]" = weakref.WeakKeyDictionary()
"""The calls of open engines, and the process groups that they use."""


class LeadingEngine(DynamicInferenceEngine):
    """An engine on rank 0 of a split model that one caller drives, as if the model were whole.

    The other ranks build a `DynamicInferenceEngine` and call `follow`. Whatever changes the engine here,
    also a stream that is let go of, is made by all ranks at the same place. What is only read is read here.
    So an `AsyncEngine`, and a server, can serve a split model.

        with msd.LeadingEngine(model, config) as engine:  # on rank 0
            engine.generate(prompts)

        msd.follow(ms.DynamicInferenceEngine(model, config))  # on each other rank

    Control-C in the main thread stops no call half-way: it is raised once this rank has made the step. A step
    that fails breaks the engine until `reset`, as that of any split model. Where a rank dies, this call or
    the next one raises a `RankDiedError`, and all ranks must be started again. A request that is added from
    inside a step waits for the step's end.

    The ranks talk over TCP connections, beside their process groups, and prove to each other that they know a
    key that the process groups carried. What they say is not encrypted, and is pickled: whoever can write to
    the connections can run code. Where the model is not split, the engine is one like any other.
    """

    def __init__(
        self,
        model: Model,
        config: InferenceConfig,
        *,
        drafter: Drafter | None = None,
        seed: int = 0,
        heartbeat: Heartbeat | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Allocate all pools, and wait until all other ranks follow. All ranks take part.

        Args:
            model, config, drafter, seed: as for `DynamicInferenceEngine`; the same on all ranks.
            heartbeat: watches the ranks during calls. Without one, a rank that stands still is noticed by
                the timeout of the process groups. It is not closed here.
            timeout_s: how long another rank may take to come, and to come to the end of a call behind this
                rank, in seconds.

        Raises:
            ValueError: this is not rank 0 of the model, or as for `DynamicInferenceEngine`.
            RuntimeError: another thread calls an open LeadingEngine of these process groups.
            RankDiedError: a rank does not follow within `timeout_s`.
        """
        if heartbeat is not None:
            instance("heartbeat", heartbeat, Heartbeat)
        timeout_s = real("timeout_s", timeout_s, 0.001, LONGEST_TIMEOUT_S)
        spec = model.state_spec() if hasattr(model, "state_spec") and not isinstance(model, type) else None
        if spec is not None and spec.groups.rank:
            raise ValueError(
                f"model is of rank {spec.groups.rank}; accepted: rank 0 leads, the others call `follow`"
            )
        if spec is not None:
            _check_unused(spec.groups)
        super().__init__(model, config, drafter=drafter, seed=seed)
        self._leading: LeaderCalls | None = None
        self._finalizer: Callable[[], object] = lambda: None
        groups = self.context.spec.groups
        if groups.is_split:
            followers = meet_followers(groups, self.context.spec.device, timeout_s)
            calls = LeaderCalls(followers, self._state, self.context.spec.device, heartbeat)
            self._finalizer = weakref.finalize(self, calls.closer())
            self._interrupts_break = False
            self._leading = calls
            _open[calls] = groups

    @property
    def has_one_caller(self) -> bool:
        return True

    @property
    def _may_cancel(self) -> bool:
        return self._leading is None or self._leading.may_end_requests

    def _apply(self, call: str, *arguments: Any) -> Any:
        make = partial(super()._apply, call, *arguments)
        if self._leading is None:
            return make()
        return self._leading.make(call, make, *followed_arguments(call, arguments))

    def changing_cache(self, *harmless: type[Exception]) -> AbstractContextManager[None]:
        """As `DynamicInferenceEngine.changing_cache`; RuntimeError where only this rank would change."""
        if self._leading is not None:
            self._leading.check_changes()
        return super().changing_cache(*harmless)

    def call_on_all(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function(engine, *arguments)` on all ranks at once, each with its own engine.

        For functions that all ranks call, as those that move prefixes, and for what every rank does to its
        part of the model:

            engine.call_on_all(msd.save_prefixes, "prefixes")

        Inside, each rank makes its calls by itself: all ranks must make the same ones. Streams and requests
        whose results are wanted belong outside.

        Args:
            function: of a module that all ranks can import; pickled by its name.
            arguments: what can be pickled. Each rank gets a copy.

        Returns:
            What the function returns on this rank.

        Raises:
            ValueError: the function or an argument cannot be pickled, or not be read on another rank.
            RankDiedError: a rank is lost.
            RuntimeError: the function raised an error on another rank alone.
            Exception: what the function raises here.
        """
        if not callable(function):
            raise ValueError(f"function is {shown(function)}; accepted: a function of the engine")
        self.check_usable("call_on_all")
        change = partial(function, self, *arguments)
        if self._leading is None:
            return change()
        if self._leading.is_running_on_all:
            raise RuntimeError("call_on_all is called by a function that it calls; call the inner one itself")
        try:
            loaded = pickle.dumps((function, arguments))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"function is {shown(function)}; accepted: what can be pickled, and its arguments ({error})"
            ) from error
        ids = next(self._new_ids), next(self._ids_without_seed)
        self._new_ids, self._ids_without_seed = count(ids[0]), count(ids[1], -1)
        return self._leading.run(change, loaded, ids)

    def check_usable(self, call: str) -> None:
        """As `DynamicInferenceEngine.check_usable`.

        Raises:
            RuntimeError: also where a function that all ranks call is called here alone.
        """
        leading = self._leading
        if leading is not None and not leading.is_running_on_all and not hasattr(type(self), call):
            raise RuntimeError(
                f"{call} is called on one rank of a split model; call it on all: "
                f"engine.call_on_all(mambaslots.net.{call}, ...)"
            )
        super().check_usable(call)

    def close(self) -> None:
        """End the calls: `follow` returns on all other ranks. A second call does nothing.

        Waits for a call under way. Requests that have not ended stay where they are: nobody serves them.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_unused(groups: ParallelGroups) -> None:
    """RuntimeError where another thread uses these groups: collectives of two threads would cross."""
    here = {group for group in (groups.tensor, groups.pipeline) if group is not None}
    for calls, used in list(_open.items()):
        other = calls.caller is not threading.current_thread() and calls.caller.is_alive()
        if other and not calls.is_closed and here & {used.tensor, used.pipeline}:
            raise RuntimeError(
                f"thread {calls.caller.name!r} calls an open LeadingEngine over the process groups of this "
                "model; close that engine first"
            )
