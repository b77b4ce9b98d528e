"""Decode states that roll: a sequence's newer state replaces its older one."""

from collections.abc import Iterable
from typing import Protocol

from .durable_slots import DurableSlots


class RollingOwner(Protocol):
    """A sequence that decodes."""

    rolling_block: int
    """The block of the newest decode state that rolls, or -1. Only `RollingStates` writes this attribute."""


class RollingStates:
    """Keeps at most one decode state per sequence, by the same rule for every host.

    An older decode state stays if a request resumed from it, because its prefix is shared then.
    """

    def __init__(self, slots: DurableSlots) -> None:
        self._slots = slots

    def make_room(self, owners: Iterable[RollingOwner], num_slots: int) -> None:
        """Drop decode states of `owners` until `num_slots` slots are free.

        The owners take newer states now. So a sequence's own older state goes before any state of another
        sequence.
        """
        for owner in owners:
            if len(self._slots.free) >= num_slots:
                return
            self._drop(owner)

    def advance(self, owner: RollingOwner, block: int, *, rolls: bool) -> None:
        """Drop the sequence's older decode state: the state at the end of `block` is committed.

        `rolls`: whether the next decode state will replace the new one. It will not if the plan keeps the new
        state, or if another sequence committed the new state.
        """
        self._drop(owner)
        if rolls:
            owner.rolling_block = block

    def forget(self, owner: RollingOwner) -> None:
        """Note that a reset took the sequence's decode state."""
        owner.rolling_block = -1

    def _drop(self, owner: RollingOwner) -> None:
        slots, block = self._slots, owner.rolling_block
        slot = slots.map.slot_of(block) if block >= 0 else -1
        if slot < 0 or slot in slots.order.used or slots.drop(block, "rolled"):
            owner.rolling_block = -1
