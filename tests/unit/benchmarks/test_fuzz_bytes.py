"""The fuzz of bytes finds nothing in a sample of its inputs, and finds each check that is taken away."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from fuzz_bytes import MAKERS
from fuzz_target import ACCEPTED, REFUSED, Target
from mambaslots.inference.contexts.tier_copies import HostCopies
from mambaslots.net.transfer import codec, exchange
from mambaslots.net.transfer.format import PrefixFormat
from mambaslots.net.transfer.offer import Offer
from mambaslots.net.transfer.shard import PrefixShard

QUICK = (
    "imported prefixes", "hand-overs received", "state files", "events of replicas", "state channel",
    "prefill answers", "lockstep connections",
)  # fmt: skip
"""Targets that are made soon."""


SLOW = (pytest.param(name, marks=pytest.mark.long) for name in MAKERS if name not in QUICK)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_sample_finds_nothing(name: str, tmp_path: Path) -> None:
    target = MAKERS[name](tmp_path)
    ends = [target.feed(target.draw(Random(index))) for index in range(40)]
    assert set(ends) == {ACCEPTED, REFUSED}
    getattr(target, "close", lambda: None)()


def unchecked(self: HostCopies, row: Any, host_slot: int, serial: int) -> bool:
    row.copy_(self.rows[host_slot])
    return True


def ask(self: Offer, answer: dict[str, Any]) -> Any:
    return answer["blocks"], answer["states"]


class Alike(list[int]):
    def __ne__(self, other: object) -> bool:
        return False


REAL_RECEIVE = exchange.receive_pieces


def receive_alike(*arguments: Any) -> list[int]:
    return Alike(REAL_RECEIVE(*arguments))


def take_all(*_: object) -> None:
    pass


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "shapes of imported tensors": ("imported prefixes", PrefixShard, "check", take_all),
    "the format of imported prefixes": ("imported prefixes", PrefixFormat, "check_fits", take_all),
    "what a receiver may ask for": ("hand-overs sent", Offer, "rows_of", ask),
    "the checksum of imported bytes": ("imported prefixes", codec, "_check_checksum", take_all),
    "checksums of pieces": ("hand-overs received", exchange, "receive_pieces", receive_alike),
    "checksums of host memory": ("host memory rows", HostCopies, "_bring", unchecked),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_that_is_taken_away_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, where, check, without = FAULTS[fault]
    target = MAKERS[name](tmp_path)
    monkeypatch.setattr(where, check, without)
    drawn = (target.draw(Random(index)) for index in range(800))
    assert any(map(partial(finds, target), drawn))


def finds(target: Target, drawn: object) -> bool:
    """Whether feeding is a finding."""
    try:
        target.feed(drawn)
    except Exception as error:
        return not isinstance(error, target.documented)
    return False
