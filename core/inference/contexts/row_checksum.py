"""Checksums of rows of bytes, computed where the bytes are."""

import torch
from torch import Tensor

_COLUMNS = 1024
_MAX_WORDS = 1 << 22  # words that are multiplied at once: what the scratch memory holds


class RowChecksum:
    """Sums the words of a row, each times its own odd weight, modulo 2**64.

    A word that changes alone changes the sum, because odd weights are invertible; others with a probability
    of all but 2**-64. The weight at row r and column c of the row's [rows, 1024] words is a product of two
    random odd numbers. The last words, fewer than 1024, are weighted as columns.
    """

    @torch.inference_mode(False)
    def __init__(self, row_bytes: int, device: torch.device) -> None:
        """For rows of at most `row_bytes` on `device`, summed as 8-byte words if that is a multiple of 8."""
        self._word = torch.int64 if row_bytes % 8 == 0 else torch.uint8
        self.num_words = row_bytes // self._word.itemsize
        self._num_rows = self.num_words // _COLUMNS
        self._rows_at_once = max(1, min(self._num_rows, _MAX_WORDS // _COLUMNS))
        generator = torch.Generator("cpu").manual_seed(0x6D616D6261)
        weights = torch.randint(-(1 << 62), 1 << 62, (_COLUMNS + self._num_rows,), generator=generator)
        weights = (weights * 2 + 1).to(device)
        self._columns, self._rows = weights[:_COLUMNS], weights[_COLUMNS:]
        shape = (self._rows_at_once if self._num_rows else 0), _COLUMNS
        self._scratch = torch.empty(shape, dtype=torch.int64, device=device)
        self._sums = torch.empty(self._num_rows, dtype=torch.int64, device=device)

    def __call__(self, row: Tensor, seed: int) -> Tensor:
        """The checksum [] int64 of a row [bytes] uint8 at a multiple of 8, by `seed` < 2**63.

        One stream at a time uses an object, because its scratch memory is one.
        """
        words = row.view(self._word)
        num_rows = len(words) // _COLUMNS
        inner = words[: num_rows * _COLUMNS].view(-1, _COLUMNS)
        for start in range(0, num_rows, self._rows_at_once):
            part = inner[start : start + self._rows_at_once]
            products = torch.mul(part, self._columns, out=self._scratch[: len(part)])
            torch.sum(products, 1, out=self._sums[start : start + len(part)])
        sums = self._sums[:num_rows]
        total = torch.mul(sums, self._rows[:num_rows], out=sums).sum()
        tail = words[num_rows * _COLUMNS :]
        if len(tail):
            return total + ((tail * self._columns[: len(tail)]).sum() ^ seed)
        return total + seed
