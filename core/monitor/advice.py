"""Why prompt tokens were computed, and the setting that would have saved them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cache_stats import EngineStats
from ..inference.contexts.cache.pool_stats import EVICTIONS
from ..inference.contexts.cache.prefix_match import ComputeReason
from ..inference.contexts.pool_sizes import GIGABYTE
from ..inference.engines.dynamic_engine import DynamicInferenceEngine

logger = logging.getLogger("mambaslots.monitor")

MAX_LOST_SHARE = 0.2
WINDOW_TOKENS = 50_000
"""A reason that costs more than this share of so many prompt tokens is warned of."""
_UNUSED = 0.8  # a larger share of evicted states without a use is warned of
_SENTENCES: dict[ComputeReason, str] = {
    "never_seen": "no earlier request had these tokens at this place",
    "kv_evicted": "their KV was evicted; more num_kv_blocks (or total_gb) keep it longer",
    "state_not_taken": (
        "no state was taken that deep; CheckpointPlan.marks or prefill_interval take more states"
    ),
    "branch_first_seen": (
        "this request is the first to differ from a cached prompt there, and no state lies at the branch; "
        "CheckpointPlan.marks or prefill_interval take states before prompts branch"
    ),
    "state_evicted": ("the state there was evicted; more num_mamba_slots (or total_gb) keep it longer"),
    "last_token": "a prompt's last token is always computed, with its block; no setting helps",
    "partial_block": (
        "they do not fill the smallest block that the model allows ({grid} tokens); no setting helps"
    ),
    "capacity": (
        "a state was planned there and no slot was free; more num_mamba_slots or fewer pins make room"
    ),
    "disabled": (
        "the cache was not used there: enable_prefix_caching is False, the request wants the log-probs of "
        "its prompt (skip_prompt_log_probs=False), or the cache was reset while it ran"
    ),
}
_SMALLER_BLOCK = (
    "they do not fill a block; a smaller block_size_tokens (a multiple of {grid}) shares more of short tails"
)


def why_not_deeper(
    spans: Sequence[Sequence[Any]], resume_point: int, num_prompt_tokens: int, grid: int
) -> str:
    """Why a request did not resume deeper than `resume_point`, with the setting that helps.

    `spans` are [start, stop, reason] of computed prompt tokens, in order.
    """
    if not spans:
        return "It has computed nothing yet."
    first = next((span for span in spans if span[1] > resume_point), None)
    if first is None:
        return f"Its prompt was computed before a restart; it resumed {resume_point} tokens."
    start, stop, reason = max(first[0], resume_point), first[1], first[2]
    resumed = f"It resumed {resume_point} of {num_prompt_tokens} tokens; tokens" if resume_point else "Tokens"
    fills_smaller = reason == "partial_block" and stop - start >= grid
    sentence = (_SMALLER_BLOCK if fills_smaller else _SENTENCES[reason]).format(grid=grid)
    return f"{resumed} {start} to {stop} were computed: {sentence}."


_ADVISED: tuple[ComputeReason, ...] = ("state_not_taken", "branch_first_seen", "disabled")
"""Reasons that settings remove without more memory."""


class MissWatch:
    """Looks for settings that cost hits. Each warning is given once."""

    def __init__(self, engine: DynamicInferenceEngine, stats: EngineStats) -> None:
        spec, config = engine.context.spec, engine.config
        self.warnings: list[str] = []
        self._config = config
        self._num_slots = engine.context.prefix_cache.pins.max_slots
        self._slot_bytes = spec.slot_bytes
        self._kv_block_bytes = spec.kv_block_bytes(config.block_size_tokens)
        self._grid = spec.grid
        self._start = stats
        self._given: set[str] = set()
        if not config.enable_prefix_caching:
            self._warn(
                "off",
                "enable_prefix_caching is False: no prompt resumes anything; set it to True, with "
                "num_mamba_slots",
            )

    def look(self, stats: EngineStats, num_slots_of_pins: int = 0) -> None:
        """Judge what has happened since the last look. `num_slots_of_pins`: slots of pinned prefixes."""
        if not self._config.enable_prefix_caching:
            return
        if num_slots_of_pins >= self._num_slots:
            self._warn(
                "pins",
                f"pinned prefixes keep all {self._num_slots} state slots but those of idle rows: where all "
                "rows run, no new state can be cached; unpin some, or raise num_mamba_slots",
            )
        before, now = self._start.cache, stats.cache
        if now.num_prompt_tokens < before.num_prompt_tokens:  # the engine was reset
            self._start = stats
        elif now.num_prompt_tokens - before.num_prompt_tokens >= WINDOW_TOKENS:
            for key, sentence in self._losses(stats):
                self._warn(key, sentence)
            self._start = stats

    def _losses(self, stats: EngineStats) -> Iterator[tuple[str, str]]:
        now, before = stats.cache, self._start.cache
        num_tokens = now.num_prompt_tokens - before.num_prompt_tokens
        lost = differences(now.computed_by_reason, before.computed_by_reason)
        left = differences(now.states_removed_by_cause, before.states_removed_by_cause)
        kv_left = differences(now.kv_blocks_removed_by_cause, before.kv_blocks_removed_by_cause)

        def share(*reasons: ComputeReason) -> float:
            return sum(lost[reason] for reason in reasons) / num_tokens

        def opening(*reasons: ComputeReason) -> str:
            names = " and ".join(reasons)
            return f"{share(*reasons):.0%} of {num_tokens} prompt tokens were computed because of {names}: "

        states: tuple[ComputeReason, ...] = ("state_evicted", "capacity")
        if share(*states) > MAX_LOST_SHARE:
            reasons = [reason for reason in states if lost[reason]]
            num_refused = max(0, now.num_states_refused - before.num_states_refused)
            number = left["new_state"] + left["live_state"] + num_refused
            more = self._more("num_mamba_slots", number, "states", self._slot_bytes)
            yield "states", opening(*reasons) + more
            unused = max(0, now.num_states_evicted_unused - before.num_states_evicted_unused)
            evicted = sum(count for cause, count in left.items() if cause in EVICTIONS)
            if evicted and unused / evicted > _UNUSED:
                yield (
                    "unused",
                    f"{unused} of {evicted} evicted states had never been resumed from, and others were "
                    "missed: take fewer states by checkpoint_plan (a longer prefill_interval, "
                    "chunk_ends=False, decode='off')",
                )
        if share("kv_evicted") > MAX_LOST_SHARE:
            number = kv_left["new_block"]
            more = self._more("num_kv_blocks", number, "KV blocks", self._kv_block_bytes)
            yield "kv_evicted", opening("kv_evicted") + more
        if share("partial_block") > MAX_LOST_SHARE and self._config.block_size_tokens > self._grid:
            yield "block", opening("partial_block") + _SMALLER_BLOCK.format(grid=self._grid)
        for reason in _ADVISED:
            if share(reason) > MAX_LOST_SHARE:
                yield reason, opening(reason) + _SENTENCES[reason]

    def _more(self, setting: str, number: int, what: str, bytes_each: int) -> str:
        number = max(1, number)
        if self._config.total_gb is not None:
            gb = number * bytes_each / GIGABYTE
            return f"raise total_gb by up to {gb:.3g}: the {number} {what} lost meanwhile"
        return f"raise {setting} by up to {number}: the {what} lost meanwhile"

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._given:
            self._given.add(key)
            self.warnings.append(sentence)
            logger.warning("%s", sentence)


def differences[Name: str](now: Mapping[Name, int], before: Mapping[Name, int]) -> dict[Name, int]:
    """How much counts have grown; a count that has fallen was reset, and has grown from 0."""
    return {
        name: number - before.get(name, 0) if number >= before.get(name, 0) else number
        for name, number in now.items()
    }
