"""A token for each row of logits, the most likely one or a drawn one; log-probs of tokens, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .dtypes_and_strides import compute_dtype
from .kernel_set import runs_triton
from .step_rows import TokenDraw

LOG_PROB_ROWS = 256
"""The log-probs of so many rows of logits are computed at once, so that they take little memory."""
TOP_ROWS = 64  # as LOG_PROB_ROWS, for the most likely tokens


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> tuple[Tensor, Tensor]:
    """A token for each row, and its largest logit. Synchronises only without triton, or in float64."""
    if len(draws) < len(logits):
        largest, tokens = logits.max(dim=-1)
    else:
        largest = logits.amax(dim=-1)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if draws:
        if runs_triton(logits.device) and logits.dtype != torch.float64:
            from .token_draws import draw_tokens
        else:
            from .reference.torch_token_draws import draw_tokens
        draw_tokens(tokens, logits, largest, draws)
    return tokens, largest


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs [rows] of one token for each row of logits, with the same bits in any batch of rows."""
    blocks = zip(torch.split(logits, LOG_PROB_ROWS), torch.split(tokens, LOG_PROB_ROWS), strict=True)
    return torch.cat([log_softmax(rows).gather(1, chosen[:, None])[:, 0] for rows, chosen in blocks])


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of the model's own distribution, in max(float32, the logits' dtype)."""
    dtype = compute_dtype(logits.dtype)
    if logits.device.type == "cpu":  # a float32 sum of 50,000 terms is off by 2e-5 with AVX2
        return torch.log_softmax(logits.double(), dim=-1).to(dtype)
    wide = logits.to(dtype)
    missing = -wide.shape[1] % (16 // wide.element_size()) if wide.device.type == "cuda" else 0
    if not missing:
        return torch.log_softmax(wide, dim=-1)
    padded = torch.nn.functional.pad(wide, (0, missing), value=-torch.inf)
    return torch.log_softmax(padded, dim=-1)[:, : wide.shape[1]]


def top_log_probs(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row, and their log-probs under the model's own distribution."""
    blocks = [_top_of_block(rows, number) for rows in torch.split(logits, TOP_ROWS)]
    ids, log_probs = zip(*blocks, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _top_of_block(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    # topk returns any of several equal values: it says which logit is the last one, and not whose.
    vocab_size = logits.shape[1]
    last = logits.topk(number, dim=-1).values[:, -1:]
    above, equal = logits > last, logits == last
    num_equal = number - above.sum(dim=-1, keepdim=True, dtype=torch.int32)
    chosen = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= num_equal))
    from_the_end = torch.arange(vocab_size, 0, -1, dtype=torch.int32, device=logits.device)
    keys = torch.where(chosen, from_the_end, 1).topk(number, dim=-1).values  # of ascending ids
    ids = vocab_size - keys.long()
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    return ids, log_softmax(logits).gather(1, ids)
