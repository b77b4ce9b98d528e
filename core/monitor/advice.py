"""Why prompt tokens were computed, and the setting that would have saved them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..cache_stats import CacheStats, EngineStats
from ..devices import GIGABYTE
from ..inference.contexts.cache.pool_stats import STATE_EVICTIONS, ComputeReason
from ..inference.engines.dynamic_engine import DynamicInferenceEngine

logger = logging.getLogger(__package__)

MAX_LOST_SHARE = 0.2
WINDOW_TOKENS = 50_000  # a reason that costs more than this share of so many prompt tokens is warned of
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
    "they do not fill a block; a smaller block_size_tokens (a multiple of {grid}) caches more of them"
)


def why_not_deeper(
    spans: Sequence[Sequence[Any]], resume_point: int, num_prompt_tokens: int, grid: int
) -> str:
    """Why a request resumed no deeper, and what helps; `spans`: [start, stop, reason] of computed tokens."""
    if not spans:
        return "It has computed nothing yet."
    first_span = next((span for span in spans if span[1] > resume_point), None)
    if first_span is None:
        return f"Its prompt was computed before a restart; it resumed {resume_point} tokens."
    first_start, stop, reason = first_span
    start = max(first_start, resume_point)
    intro = f"It resumed {resume_point} of {num_prompt_tokens} tokens; tokens" if resume_point else "Tokens"
    fills_smaller_block = reason == "partial_block" and stop - start >= grid
    sentence = _SMALLER_BLOCK if fills_smaller_block else _SENTENCES[reason]
    return f"{intro} {start} to {stop} were computed: {sentence.format(grid=grid)}."


_ADVISED: tuple[ComputeReason, ...] = ("state_not_taken", "branch_first_seen", "disabled")
"""Reasons that settings remove without more memory."""


class MissWatch:
    """Looks for settings that cost hits. Each warning is given once."""

    def __init__(self, engine: DynamicInferenceEngine, stats: EngineStats) -> None:
        spec = engine.context.spec
        config = engine.config
        self.warnings: dict[str, str] = {}  # by what they are about
        self._config = config
        self._slot_gb = spec.slot_bytes / GIGABYTE
        self._kv_block_gb = spec.kv_block_bytes(config.block_size_tokens) / GIGABYTE
        self._grid = spec.grid
        self._start = stats
        if not config.enable_prefix_caching:
            self._warn(
                "off",
                "enable_prefix_caching is False: no prompt resumes anything; set it to True, with "
                "num_mamba_slots",
            )

    def check(self, stats: EngineStats) -> None:
        """Judge what has happened since the last look, once it is a window of prompt tokens."""
        num_tokens = stats.cache.num_prompt_tokens - self._start.cache.num_prompt_tokens
        if num_tokens < 0:  # the engine was reset
            self._start = stats
        elif self._config.enable_prefix_caching and num_tokens >= WINDOW_TOKENS:
            self._judge(stats.cache, self._start.cache)
            self._start = stats

    def _judge(self, stats: CacheStats, old_stats: CacheStats) -> None:
        num_tokens = stats.num_prompt_tokens - old_stats.num_prompt_tokens
        lost_tokens = differences(stats.computed_by_reason, old_stats.computed_by_reason)
        states = differences(stats.states_removed_by_cause, old_stats.states_removed_by_cause)
        blocks = differences(stats.kv_blocks_removed_by_cause, old_stats.kv_blocks_removed_by_cause)
        num_refused = max(0, stats.num_states_refused - old_stats.num_states_refused)
        num_states = max(1, sum(states[cause] for cause in STATE_EVICTIONS) + num_refused)
        num_blocks = max(1, blocks["new_block"])
        advice: dict[tuple[ComputeReason, ...], str] = {
            ("state_evicted", "capacity"): f"raise num_mamba_slots by up to {num_states}, or total_gb by "
            f"{num_states * self._slot_gb:.3g}: the states lost meanwhile",
            ("kv_evicted",): f"raise num_kv_blocks by up to {num_blocks}, or total_gb by "
            f"{num_blocks * self._kv_block_gb:.3g}: the KV blocks lost meanwhile",
            **{(reason,): _SENTENCES[reason] for reason in _ADVISED},
        }
        if self._config.block_size_tokens > self._grid:
            advice["partial_block",] = _SMALLER_BLOCK.format(grid=self._grid)
        for reasons, sentence in advice.items():
            share = sum(lost_tokens[reason] for reason in reasons) / num_tokens
            if share > MAX_LOST_SHARE:
                names = " and ".join(reason for reason in reasons if lost_tokens[reason])
                self._warn(
                    reasons[0],
                    f"{share:.0%} of {num_tokens} prompt tokens were computed because of {names}: {sentence}",
                )

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self.warnings:
            self.warnings[key] = sentence
            logger.warning("%s", sentence)


def differences[Name: str](counts: Mapping[Name, int], old_counts: Mapping[Name, int]) -> dict[Name, int]:
    """How much counts have grown; a count that has fallen was reset, and has grown from 0."""
    return {
        name: number - old_counts.get(name, 0) if number >= old_counts.get(name, 0) else number
        for name, number in counts.items()
    }
