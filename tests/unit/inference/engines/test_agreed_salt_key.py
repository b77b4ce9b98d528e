"""The ranks of a model use one salt key."""

from collections.abc import Callable
from typing import Any

import pytest
from mambaslots.inference.contexts.cache.hashing import ENVIRONMENT_NAME, SaltKey
from mambaslots.inference.engines.request_factory import agreed_salt_key
from mambaslots.parallel_groups import ParallelGroups

ONE = ParallelGroups()


def split(*first_answers: Any) -> ParallelGroups:
    """Groups of two ranks; rank 0 answers so to each gathering, and this rank is rank 1."""
    answers = iter(first_answers)
    return gathering(lambda value, device: [next(answers), value])


def gathering(gather: Callable[[Any, Any], list[Any]]) -> ParallelGroups:
    groups = ParallelGroups()
    object.__setattr__(groups, "gather", gather)
    return groups


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_NAME, raising=False)


def test_the_setting_goes_before_the_environment_and_a_drawn_key(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {agreed_salt_key(None, ONE).key_id for _ in range(2)}
    assert len(drawn) == 2
    monkeypatch.setenv(ENVIRONMENT_NAME, "e" * 16)
    assert agreed_salt_key(None, ONE).key_id == SaltKey(b"e" * 16).key_id
    assert agreed_salt_key("s" * 16, ONE).key_id == SaltKey(b"s" * 16).key_id


def test_a_drawn_key_is_that_of_the_first_rank() -> None:
    assert (
        agreed_salt_key(None, split("", None, b"drawn by rank 0!")).key_id
        == SaltKey(b"drawn by rank 0!").key_id
    )


def test_a_given_key_stays_on_its_rank() -> None:
    sent: list[Any] = []
    key_id = SaltKey(b"k" * 16).key_id

    def gather(value: Any, device: Any) -> list[Any]:
        sent.append(value)
        return ["" if value == "" else key_id, value]

    assert agreed_salt_key(b"k" * 16, gathering(gather)).key_id == key_id
    assert sent == ["", key_id]


@pytest.mark.parametrize(("theirs", "ours"), [(None, b"k" * 16), ("0" * 16, None), ("0" * 16, b"k" * 16)])
def test_ranks_with_different_keys_are_refused(theirs: str | None, ours: bytes | None) -> None:
    with pytest.raises(ValueError, match="accepted: one key on all ranks, or none on any"):
        agreed_salt_key(ours, split("", theirs))


def test_a_key_that_another_rank_cannot_use_is_refused_on_all() -> None:
    with pytest.raises(ValueError, match="salt_key is 5 bytes"):
        agreed_salt_key(b"k" * 16, split("salt_key is 5 bytes; accepted: more"))
