"""Logits lowered by how often tokens occurred, in torch."""

import torch
from torch import Tensor


def penalize(logits: Tensor, counts: Tensor, count_rows: Tensor, settings: Tensor) -> Tensor:
    """The logits in the dtype of `settings`, lowered by how often tokens occurred, as `counts` says.

    With c generated ones of a token: logit / r where it is positive, else logit * r, if the token is in the
    prompt or c > 0 (repetition penalty r, Keskar et al. 2019); then - f * c, and - p where c > 0 (frequency
    and presence penalty, OpenAI's API). Counts are 2 c, plus 1 for a token of the prompt; `count_rows` has
    each row's row of `counts`, -1 where nothing is lowered; `settings` [3, rows] are r, f and p of each row.
    Example: logit 2, r = 1.25, f = 0.1, p = 0.5, c = 3: 0.8.
    """
    out = logits.to(settings.dtype, copy=True)
    rows = (count_rows >= 0).nonzero()[:, 0]
    repetition, frequency, presence = settings[:, rows, None]
    values, row_counts = out.index_select(0, rows), counts.index_select(0, count_rows[rows])
    repeated = torch.where(values < 0, values * repetition, values / repetition)
    values = torch.where(row_counts > 0, repeated, values)
    generated = row_counts >> 1
    values = values - frequency * generated - presence * (generated > 0)
    return out.index_copy_(0, rows, values)
