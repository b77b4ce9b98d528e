"""Warnings about prompt tokens that a setting would have saved."""

import logging
from collections import deque
from collections.abc import Iterator
from statistics import median

from ..cache_stats import EngineStats
from ..config import InferenceConfig
from ..inference.contexts.cache.pool_stats import EVICTIONS
from ..inference.contexts.cache.reasons import ComputeReason
from ..inference.contexts.pool_sizes import GIGABYTE
from .figures import differences

logger = logging.getLogger("mambaslots.monitor")

_NUM_PROMPTS = 64  # so many of the last prompts say what a typical length is
_UNUSED = 0.8  # a larger share of evicted states that nobody had used is worth a word

_ADVICE: dict[ComputeReason, str] = {
    "state_not_taken": "no state was taken that deep; give CheckpointPlan.marks where prompts branch, or a "
    "checkpoint_plan with a prefill_interval of a few blocks",
    "branch_first_seen": "prompts leave known paths where no state lies; give CheckpointPlan.marks where "
    "they branch, or a checkpoint_plan with a prefill_interval of a few blocks",
    "disabled": "their log-probs are wanted (skip_prompt_log_probs=False, or engine.score); a later "
    "prompt_log_probs_start resumes more, or the cache was reset while requests ran",
}


class MissWatch:
    """Looks for settings that cost hits. Each warning is given once.

    Attributes:
        warnings: the sentences that were logged, in order.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        num_slots: int,
        slot_bytes: int,
        kv_block_bytes: int,
        grid: int,
        max_lost_share: float,
        window_tokens: int,
        stats: EngineStats,
    ) -> None:
        """
        Args:
            num_slots: slots that pinned prefixes may keep.
            slot_bytes, kv_block_bytes: bytes of a state and of a KV block, over all layers of this rank.
            grid: every block is a multiple of this number of tokens.
            max_lost_share: a reason that costs a larger share of the prompt tokens of a window is warned of.
            window_tokens: prompt tokens of a window.
            stats: the engine's figures now.
        """
        self.warnings: list[str] = []
        self._config = config
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._kv_block_bytes = kv_block_bytes
        self._grid = grid
        self._max_lost_share = max_lost_share
        self._window_tokens = window_tokens
        self._start = stats
        self._given: set[str] = set()
        self._lengths: deque[int] = deque(maxlen=_NUM_PROMPTS)
        if not config.enable_prefix_caching:
            self._warn(
                "off",
                "enable_prefix_caching is False: no prompt resumes anything; set it to True, with "
                "num_mamba_slots",
            )

    def note_prompt(self, num_tokens: int) -> None:
        """Note the length of a new prompt."""
        self._lengths.append(num_tokens)

    def look(self, stats: EngineStats, num_slots_of_pins: int = 0) -> None:
        """Judge what has happened since the last look. `num_slots_of_pins`: slots of pinned prefixes."""
        if not self._config.enable_prefix_caching:
            return
        self._look_at_lengths()
        if num_slots_of_pins >= self._num_slots:
            self._warn(
                "pins",
                f"pinned prefixes keep all {self._num_slots} state slots but those of idle rows: where all "
                "rows run, no new state can be cached; unpin some, or raise num_mamba_slots",
            )
        before, now = self._start.cache, stats.cache
        if now.num_prompt_tokens < before.num_prompt_tokens:  # the engine was reset
            self._start = stats
        elif now.num_prompt_tokens - before.num_prompt_tokens >= self._window_tokens:
            for key, sentence in self._losses(stats):
                self._warn(key, sentence)
            self._start = stats

    def _look_at_lengths(self) -> None:
        size, grid = self._config.block_size_tokens, self._grid
        if len(self._lengths) < _NUM_PROMPTS:
            return
        typical = int(median(self._lengths))
        if typical >= size:
            return
        known = (
            f"half of the last {_NUM_PROMPTS} prompts have at most {typical} tokens, and a block has {size}"
        )
        smaller = max(grid, typical // 4 // grid * grid)
        if smaller < size and smaller <= typical:
            advice = f"set block_size_tokens to {smaller} (accepted: a multiple of {grid})"
        else:
            advice = f"the model allows no block_size_tokens below {grid}, so longer prompts alone can hit"
        self._warn("block", f"{known}: such prompts cannot resume anything; {advice}")

    def _losses(self, stats: EngineStats) -> Iterator[tuple[str, str]]:
        now, before = stats.cache, self._start.cache
        num_tokens = now.num_prompt_tokens - before.num_prompt_tokens
        lost = differences(now.computed_by_reason, before.computed_by_reason)
        left = differences(now.states_left_by_cause, before.states_left_by_cause)
        kv_left = differences(now.kv_blocks_left_by_cause, before.kv_blocks_left_by_cause)

        def share(*reasons: ComputeReason) -> float:
            return sum(lost[reason] for reason in reasons) / num_tokens

        def opening(*reasons: ComputeReason) -> str:
            names = " and ".join(reasons)
            return f"{share(*reasons):.0%} of {num_tokens} prompt tokens were computed because of {names}: "

        if share("state_evicted", "capacity") > self._max_lost_share:
            known: tuple[ComputeReason, ...] = ("state_evicted", "capacity")
            reasons = [reason for reason in known if lost[reason]]
            num_refused = max(0, now.num_states_refused - before.num_states_refused)
            number = left["new_state"] + left["live_state"] + num_refused
            yield "states", f"{opening(*reasons)}{self._more_slots(number)}"
            unused = max(0, now.num_states_evicted_unused - before.num_states_evicted_unused)
            evicted = sum(count for cause, count in left.items() if cause in EVICTIONS)
            if evicted and unused / evicted > _UNUSED:
                yield (
                    "unused",
                    f"{unused} of {evicted} evicted states had never been resumed from, and others were "
                    "missed: take fewer states by checkpoint_plan (a longer prefill_interval, "
                    "chunk_ends=False, decode='off')",
                )
        if share("kv_evicted") > self._max_lost_share:
            yield "kv_evicted", f"{opening('kv_evicted')}{self._more_blocks(kv_left['new_block'])}"
        for reason, advice in _ADVICE.items():
            if share(reason) > self._max_lost_share:
                yield reason, opening(reason) + advice

    def _more_slots(self, number: int) -> str:
        number = max(1, number)
        if self._config.total_gb is not None:
            gb = number * self._slot_bytes / GIGABYTE
            return f"raise total_gb by up to {gb:.3g}: the {number} states lost meanwhile"
        return f"raise num_mamba_slots by up to {number}: the states lost meanwhile"

    def _more_blocks(self, number: int) -> str:
        number = max(1, number)
        if self._config.total_gb is not None:
            gb = number * self._kv_block_bytes / GIGABYTE
            return f"raise total_gb by up to {gb:.3g}: the {number} KV blocks lost meanwhile"
        return f"raise num_kv_blocks by up to {number}: the KV blocks lost meanwhile"

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._given:
            self._given.add(key)
            self.warnings.append(sentence)
            logger.warning("%s", sentence)
