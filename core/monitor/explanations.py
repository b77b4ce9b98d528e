"""Why a request did not resume deeper, in a sentence that names the setting that helps."""

from collections.abc import Sequence
from typing import Any

from ..inference.contexts.cache.reasons import ComputeReason

_SENTENCES: dict[ComputeReason, str] = {
    "never_seen": "no earlier request had these tokens at this place",
    "kv_evicted": "their KV was evicted; more num_kv_blocks (or total_gb) keep it longer",
    "state_not_taken": (
        "no state was taken that deep; CheckpointPlan.marks or prefill_interval take more states"
    ),
    "branch_first_seen": (
        "this request is the first to leave a known path there, and no state lies at the branch; "
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
    """Why a request did not resume deeper than it did.

    Args:
        spans: [start, stop, reason] of computed prompt tokens, in order.
        resume_point: where the request last began behind resumed tokens; 0 where it resumed none.
        num_prompt_tokens: tokens of the prompt.
        grid: tokens of the smallest block that the model allows.
    """
    if not spans:
        return "It has computed nothing yet."
    first = next((span for span in spans if span[1] > resume_point), None)
    if first is None:
        return f"Its prompt was computed before a restart; it began again behind {resume_point} tokens."
    start, stop, reason = max(first[0], resume_point), first[1], first[2]
    resumed = f"It resumed {resume_point} of {num_prompt_tokens} tokens; tokens" if resume_point else "Tokens"
    fills_smaller = reason == "partial_block" and stop - start >= grid
    sentence = (_SMALLER_BLOCK if fills_smaller else _SENTENCES[reason]).format(grid=grid)
    return f"{resumed} {start} to {stop} were computed: {sentence}."
