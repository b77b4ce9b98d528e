"""Copies of states that are late, change places, fail, or leave other bytes."""

from collections.abc import Sequence
from random import Random

from mambaslots.inference.contexts.cache.state_tiers import StateTiers
from mambaslots.inference.contexts.tier_copies import HostCopies
from torch import Tensor


class CopyFailedError(Exception):
    """What a failing copy raises."""


class FaultyCopies:
    """What `HostCopies` does on a CPU, at another time, in another order, or wrongly.

    As a device does, it puts a state aside when the state leaves. What follows happens at any later call.

    Attributes:
        num_faults: copies that failed or left other bytes.
    """

    def __init__(self, copies: HostCopies, random: Random, share: float = 0.15) -> None:
        """`share`: how many copies go wrong, each in its own way."""
        self.num_faults = 0
        self._copies = copies
        self._random = random
        self._share = share
        self._late: list[tuple[Tensor, int, int]] = []

    @property
    def memory(self) -> Tensor:
        return self._copies.memory

    def _fails(self) -> bool:
        fails = self._random.random() < self._share
        self.num_faults += fails
        return fails

    def store(self, slot: int, host_slot: int, serial: int) -> None:
        self._work()
        if self._fails():
            raise CopyFailedError
        self._late.append((self._copies._bytes_of(slot).clone(), host_slot, serial))
        self._work()

    def _work(self) -> None:
        """Make some of the late copies, in any order."""
        self._random.shuffle(self._late)
        for _ in range(self._random.randint(0, len(self._late))):
            self._make(*self._late.pop())

    def _make(self, row: Tensor, host_slot: int, serial: int) -> None:
        self._copies._copy_to_host(row, host_slot, serial)
        if self._fails():
            self._spoil(self._copies.memory[host_slot])

    def _spoil(self, row: Tensor) -> None:
        if len(row):
            row[self._random.randrange(len(row))] ^= 1 << self._random.randrange(8)

    def fetch(self, host_slot: int, slot: int, serial: int) -> bool:
        self._work()
        if self._fails():
            self._spoil(self._copies._bytes_of(slot))
            raise CopyFailedError
        return self._copies.fetch(host_slot, slot, serial)

    def save(self, host_slot: int, file: int, serial: int) -> None:
        if self._fails():
            raise CopyFailedError
        self._copies.save(host_slot, file, serial)

    def load(self, file: int, host_slot: int, serial: int) -> bool:
        return not self._fails() and self._copies.load(file, host_slot, serial)

    def delete(self, files: Sequence[int] | None) -> None:
        self._copies.delete(files)

    def zero(self, host_slots: Sequence[int]) -> None:
        while self._late:  # as a stream does: behind all that was launched before
            self._make(*self._late.pop(0))
        self._copies.zero(host_slots)

    def deallocate_staging(self) -> None:
        self._copies.deallocate_staging()


def make_faulty(
    tier: StateTiers, random: Random, share: float = 0.15, kind: type[FaultyCopies] = FaultyCopies
) -> FaultyCopies:
    """Let the tier's copies go wrong from now on."""
    assert isinstance(tier.copies, HostCopies)
    copies = kind(tier.copies, random, share)
    tier.copies = copies
    if tier.host.dirty._zero is not None:
        tier.host.dirty._zero = copies.zero
    return copies
