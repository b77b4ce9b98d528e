"""How many bits a model needs for a byte of files that it has not seen."""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from .special_tokens import DOCUMENT

WINDOW = 2048


@torch.no_grad()
def bits_per_byte(
    logits_of: Callable[[Tensor], Tensor], texts: Iterable[bytes], device: torch.device, batch: int = 16
) -> float:
    """Mean of -log2 of the probability of each byte, over all bytes of all texts.

    A byte is predicted from the bytes before it in its file: from at least 1,024 of them where there are as
    many, from at most 2,047. Probabilities are over the whole vocabulary.

    Args:
        logits_of: [batch, WINDOW] tokens -> [batch, WINDOW, vocabulary] logits.
        texts: whole files, as bytes.
    """
    windows, firsts = [], []
    num_bytes = 0
    for text in texts:
        tokens = torch.tensor([DOCUMENT, *text])
        num_bytes += len(text)
        start, known = 0, 1  # the first token is given
        while known < len(tokens):
            window = tokens[start : start + WINDOW]
            windows.append(F.pad(window, (0, WINDOW - len(window)), value=-1))
            firsts.append(known - start)
            known = start + len(window)
            start += WINDOW // 2
    nats = 0.0
    for begin in range(0, len(windows), batch):
        tokens = torch.stack(windows[begin : begin + batch]).to(device)
        first = torch.tensor(firsts[begin : begin + batch], device=device)
        logits = logits_of(tokens.clamp(min=0))[:, :-1]
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].clamp(min=0).flatten(), reduction="none"
        ).view(len(tokens), -1)
        places = torch.arange(1, WINDOW, device=device)
        counted = (places >= first[:, None]) & (tokens[:, 1:] >= 0)
        nats += float(losses.double()[counted].sum())
    return nats / math.log(2) / num_bytes
