"""Decode states that roll: a sequence's newer state replaces its older one."""

from collections.abc import Iterable
from typing import Protocol

from .durable_slots import DurableSlots


class RollingOwner(Protocol):
    """A sequence that decodes."""

    rolling_block: int
    """The block of its newest state taken while decoding, or -1; only `RollingStates` writes it."""


class RollingStates:
    """Keeps at most one decode state a sequence, for every host by the same rule.

    An older decode state that some request resumed from stays: it has become a shared prefix.
    """

    def __init__(self, slots: DurableSlots) -> None:
        self._slots = slots

    def make_room(self, owners: Iterable[RollingOwner], num_slots: int) -> None:
        """Drop older decode states of `owners`, which take newer ones now, until `num_slots` slots are free.

        Where slots are short, a sequence's own older state goes before any other sequence's state.
        """
        for owner in owners:
            if len(self._slots.free) >= num_slots:
                return
            self._drop(owner)

    def advance(self, owner: RollingOwner, block: int, *, rolls: bool) -> None:
        """The sequence's decode state at the end of `block` was committed; the older one goes.

        `rolls`: whether the new state goes with the next one. It does not where the plan keeps it, or where
        another sequence committed it.
        """
        self._drop(owner)
        if rolls:
            owner.rolling_block = block

    def forget(self, owner: RollingOwner) -> None:
        """The cache was reset: the sequence has no decode state any more."""
        owner.rolling_block = -1

    def _drop(self, owner: RollingOwner) -> None:
        slots, block = self._slots, owner.rolling_block
        slot = slots.map.slot_of(block) if block >= 0 else -1
        if slot < 0 or slots.was_used(slot) or slots.drop(block):
            owner.rolling_block = -1
