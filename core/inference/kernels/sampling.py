"""A token for each row of logits: the most likely one, or one that is drawn."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .kernel_set import runs_triton
from .operands import TokenDraw
from .reference import torch_token_draws


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> tuple[Tensor, Tensor]:
    """A token for each row, and its largest logit. Synchronises only without triton, or in float64."""
    if len(draws) < len(logits):
        largest, tokens = logits.max(dim=-1)
    else:
        largest = logits.amax(dim=-1)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if draws:
        _kernel_for(logits)(tokens, logits, largest, draws)
    return tokens, largest


def _kernel_for(logits: Tensor) -> Callable[[Tensor, Tensor, Tensor, Sequence[TokenDraw]], None]:
    if runs_triton(logits.device) and logits.dtype != torch.float64:
        from .token_draws import draw_tokens

        return draw_tokens
    return torch_token_draws.draw_tokens
