"""What compressors and a table of counts need for the same files, in bits per byte."""

import lzma
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ORDER = 5
_LZMA = lzma.PRESET_EXTREME | 9


def zlib_bits(texts: Iterable[bytes]) -> float:
    """zlib, level 9, over all files as one."""
    whole = b"".join(texts)
    return 8 * len(zlib.compress(whole, 9)) / len(whole)


def lzma_bits(texts: Iterable[bytes]) -> float:
    """lzma, preset 9 | EXTREME, over all files as one."""
    whole = b"".join(texts)
    return 8 * len(lzma.compress(whole, preset=_LZMA)) / len(whole)


def primed_lzma_bits(training: Iterable[bytes], texts: Iterable[bytes]) -> float:
    """What `texts` add to an lzma archive of the training files; its window, 64 MiB, spans all of them."""
    before, whole = b"".join(training), b"".join(texts)
    sizes = [len(lzma.compress(content, preset=_LZMA)) for content in (before + whole, before)]
    return 8 * (sizes[0] - sizes[1]) / len(whole)


def counted_bits(training: Iterable[bytes], texts: Iterable[bytes], order: int = ORDER) -> float:
    """Counts of bytes in the training files after `order` bytes, interpolated with shorter contexts.

    The interpolation is Witten and Bell's (IEEE Trans. Inf. Theory 37, 1991, method C): a context that was
    followed by d different bytes gives d parts of its weight to the context that is one byte shorter. The
    shortest is the uniform distribution. The counts do not change while `texts` are read.
    """
    seen, read = _Bytes(training, order), _Bytes(texts, order)
    probability = np.full(len(read.places), 1 / 256)
    for length in range(order + 1):
        grams, counts = np.unique(seen.grams(length), return_counts=True)
        contexts, first = np.unique(grams >> 8, return_index=True)
        totals = np.add.reduceat(counts, first)
        different = np.diff(np.append(first, len(grams)))
        wanted = read.grams(length)
        count = _look_up(grams, counts, wanted)
        total = _look_up(contexts, totals, wanted >> 8)
        novel = _look_up(contexts, different, wanted >> 8)
        known = total > 0
        mixed = (count + novel * probability) / np.maximum(total + novel, 1)
        probability = np.where(known, mixed, probability)
    return float(-np.log2(probability).mean())


class _Bytes:
    """Files one after the other, with `order` zero bytes before each."""

    def __init__(self, texts: Iterable[bytes], order: int) -> None:
        padded = [bytes(order) + text for text in texts]
        self._all = np.frombuffer(b"".join(padded), dtype=np.uint8).astype(np.int64)
        inside = np.concatenate([np.arange(len(text)) >= order for text in padded])
        self.places = np.flatnonzero(inside)

    def grams(self, length: int) -> NDArray[np.int64]:
        """For each byte: it and the `length` bytes before it as one number; `>> 8` leaves the context."""
        grams = self._all[self.places]
        for back in range(1, length + 1):
            grams = grams | self._all[self.places - back] << (8 * back)
        return grams


def _look_up(
    keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The value of each wanted key; 0 where it is not among the sorted keys."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
