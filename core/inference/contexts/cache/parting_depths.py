"""Where prompts part from earlier prompts, and where a prefill should take states because of that."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ....validation import integer

_NUM_EXACT = 8
"""Distances up to this have a count each; longer ones have two counts an octave."""
_NUM_COUNTS = 40
_WEIGHT = 1 << 16
_DECAY_EVERY = 256
_MIN_SAVING_TOKENS = 48
"""A state is taken where a new prompt is expected to save more tokens than this."""


class _Stretch(NamedTuple):
    """The blocks that a prompt brought: those between `first` and `last`; there is a state at `last`."""

    first: int
    last: int


class PartingDepths:
    """Counts how far before the ends of earlier prompts later prompts part from them.

    A later prompt that leaves an earlier one inside the earlier one's new blocks finds no state there, unless
    the earlier prefill took one on the way. Such a parting counts once a place: the plan takes a state there
    when it happens. The counts are shares: of the prompts whose new blocks reach so far back, how many were
    parted from there. Old counts fade. All numbers are integers, so that ranks agree.

    Args:
        block_size_tokens: tokens of a block.
        max_blocks: how many blocks of earlier prompts are known; the oldest are forgotten first.
    """

    def __init__(self, block_size_tokens: int, max_blocks: int) -> None:
        self._max_blocks = integer("max_blocks", max_blocks, 1)
        self._min_saving = _MIN_SAVING_TOKENS * _WEIGHT // integer("block_size_tokens", block_size_tokens, 1)
        self._known: OrderedDict[int, _Stretch | None] = OrderedDict()  # None: there is a state
        self._num_partings = [0] * _NUM_COUNTS
        self._num_chances = [0] * _NUM_COUNTS
        self._num_prompts = 0

    def learn(self, keys: Sequence[int], last: int) -> None:
        """Count where a prompt parts from earlier ones; O(its blocks).

        Args:
            keys: the hashes of the prompt's whole blocks.
            last: the deepest boundary that a repeat of the prompt can resume from, in blocks.
        """
        known = self._known
        shared = 0
        while shared < last and keys[shared] in known:
            shared += 1
        if shared:
            stretch = known[keys[shared - 1]]
            if stretch is not None:
                self._num_partings[_count_of(stretch.last - shared)] += 1
                known[keys[shared - 1]] = None
        if last - shared > 1:
            for number in range(_count_of(last - shared - 1) + 1):
                self._num_chances[number] += 1
        stretch = _Stretch(shared, last)
        for depth in range(len(keys), shared, -1):
            known[keys[depth - 1]] = stretch if depth < last else None
            known.move_to_end(keys[depth - 1])
        for depth in range(shared, 0, -1):
            known.move_to_end(keys[depth - 1])
        while len(known) > self._max_blocks:
            known.popitem(last=False)
        self._num_prompts += 1
        if self._num_prompts % _DECAY_EVERY == 0:
            for counts in (self._num_partings, self._num_chances):
                counts[:] = [count - count // 4 for count in counts]

    def depths(self, start: int, last: int) -> tuple[int, ...]:
        """Where a prefill of the blocks behind `start` should take states on its way to the one at `last`.

        The choice is exact for the counts: with depths c(1) < c(2) < .., c(0) = start and W(c) the expected
        number of partings at c or deeper, it maximises the sum of (c(i) - c(i-1)) * W(c(i)) less what each
        state has to save. O(n**2) for n distances that have occurred.

        Returns:
            Depths in (start, last), in blocks, the shallowest first.
        """
        places: list[tuple[int, int]] = []  # depth, expected partings there or deeper; the deepest first
        deeper = 0
        for number, partings in enumerate(self._num_partings):
            depth = last - _longest(number)
            if depth <= start:
                break
            if partings:
                deeper += partings * _WEIGHT // (self._num_chances[number] + 2)
                places.append((depth, deeper))
        places.reverse()
        best: list[int] = []  # for each place, what states up to it save if one is there
        before: list[int] = []
        for number, (depth, weight) in enumerate(places):
            savings, chosen = (depth - start) * weight, -1
            for other in range(number):
                saving = best[other] + (depth - places[other][0]) * weight
                if saving > savings:
                    savings, chosen = saving, other
            best.append(savings - self._min_saving)
            before.append(chosen)
        place = max(range(len(best)), key=best.__getitem__, default=-1)
        depths: list[int] = []
        while place >= 0 and best[place] > 0:
            depths.append(places[place][0])
            place = before[place]
        return tuple(reversed(depths))

    def check_integrity(self) -> None:
        """Assert what always holds of the counts."""
        assert len(self._known) <= self._max_blocks
        assert all(count >= 0 for count in (*self._num_partings, *self._num_chances))
        for stretch in self._known.values():
            assert stretch is None or 0 <= stretch.first < stretch.last


def _count_of(distance: int) -> int:
    """The number of the count of a distance in blocks, 1 or more."""
    if distance <= _NUM_EXACT:
        return distance - 1
    octave = (distance - 1).bit_length() - 1
    half = (distance - 1) >> (octave - 1) & 1
    return min(_NUM_EXACT + 2 * (octave - 3) + half, _NUM_COUNTS - 1)


def _longest(number: int) -> int:
    """The longest distance that belongs to a count."""
    if number < _NUM_EXACT:
        return number + 1
    octave, half = 3 + (number - _NUM_EXACT) // 2, (number - _NUM_EXACT) % 2
    return (1 << octave) + (half + 1 << octave - 1)
