"""The training tokens, and the random windows that a step learns from."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .source_conversations import conversations
from .source_files import SourceFiles
from .special_tokens import DOCUMENT

CONVERSATION_SHARE = 0.35  # of the windows


class TokenStream:
    """All documents one after the other: files, then conversations over them.

    Args:
        files: where the documents come from; held-out files are left out.
        device: where the tokens lie.
    """

    def __init__(self, files: SourceFiles, device: torch.device) -> None:
        plain = [np.array([DOCUMENT, *text], dtype=np.int16) for text in files.training.values()]
        talks = [np.array(tokens, dtype=np.int16) for tokens in conversations(files.training, seed=0)]
        self.num_plain, self.num_conversation_tokens = sum(map(len, plain)), sum(map(len, talks))
        self._starts = np.cumsum([0, *map(len, [*plain, *talks])])[:-1]
        self._tokens = torch.from_numpy(np.concatenate([*plain, *talks])).to(device)

    def windows(self, count: int, length: int, random: np.random.Generator) -> Tensor:
        """[count, length] int64. Half of the windows begin where a document does."""
        total = self.num_plain + self.num_conversation_tokens
        starts = np.where(
            random.random(count) < CONVERSATION_SHARE,
            random.integers(self.num_plain, total, count),
            random.integers(0, self.num_plain, count),
        )
        documents: NDArray[np.int64] = self._starts[np.searchsorted(self._starts, starts, side="right") - 1]
        starts = np.where(random.random(count) < 0.5, documents, starts)
        starts = np.minimum(starts, total - length)
        device = self._tokens.device
        places = torch.from_numpy(starts).to(device)[:, None] + torch.arange(length, device=device)
        return self._tokens[places].long()
