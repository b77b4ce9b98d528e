"""Salts are hashed under a key, and neither salts nor keys are shown."""

import hashlib
import hmac

import pytest
from mambaslots.inference.contexts.cache.hashing import (
    ENVIRONMENT_NAME,
    PUBLIC_ROOT,
    SaltKey,
    drawn_key,
    given_key,
    key_bytes,
    salt_bytes,
)

KEY, OTHER = b"k" * 16, b"o" * 16


def test_the_root_is_the_hmac_of_the_salt_and_nothing_else() -> None:
    root = SaltKey(KEY).root(b"tenant")
    assert root == hmac.new(KEY, b"mambaslots.salt\0tenant", hashlib.sha256).digest()
    assert SaltKey(KEY).root(b"tenant") == root
    assert len({root, SaltKey(OTHER).root(b"tenant"), SaltKey(KEY).root(b"tenan"), PUBLIC_ROOT}) == 4


def test_without_a_salt_every_key_gives_the_public_root() -> None:
    assert SaltKey(KEY).root(None) == SaltKey(OTHER).root(None) == PUBLIC_ROOT


def test_an_id_tells_keys_apart_and_shows_none() -> None:
    ids = {SaltKey(key).key_id for key in (KEY, KEY, OTHER, drawn_key(), drawn_key())}
    assert len(ids) == 4
    assert all(len(key_id) == 16 and int(key_id, 16) >= 0 for key_id in ids)
    assert SaltKey(KEY).root(b"mambaslots.key_id\0").hex()[:16] != SaltKey(KEY).key_id
    assert "kkkk" not in repr(SaltKey(KEY))


def test_the_configuration_goes_before_the_environment() -> None:
    assert given_key(KEY, {ENVIRONMENT_NAME: "e" * 16}) == KEY
    assert given_key("s" * 16, {}) == b"s" * 16
    assert given_key(None, {ENVIRONMENT_NAME: "e" * 16}) == b"e" * 16
    assert given_key(None, {}) is None
    with pytest.raises(ValueError, match=f"^{ENVIRONMENT_NAME} is 5 bytes; accepted: "):
        given_key(None, {ENVIRONMENT_NAME: "short"})


@pytest.mark.parametrize("key", ["", b"", "secret", b"x" * 15, 5, None, bytearray(16), ["x"] * 16])
def test_what_is_no_key_is_refused_without_being_shown(key: object) -> None:
    with pytest.raises(ValueError, match=r"^salt_key is (\d+ bytes|a \w+); accepted: ") as error:
        key_bytes("salt_key", key)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("salt", "expected"), [(None, None), (b"\xff", b"\xff"), ("ü", "ü".encode()), (b"\0", b"\0")]
)
def test_a_salt_is_bytes_a_str_or_nothing(salt: object, expected: bytes | None) -> None:
    assert salt_bytes("salt", salt) == expected


@pytest.mark.parametrize("salt", [5, [b"x"], bytearray(b"x"), "\ud800", "", b""])
def test_what_is_no_salt_is_refused_by_name(salt: object) -> None:
    with pytest.raises(ValueError, match=r"^cache_salt is .*; accepted: "):
        salt_bytes("cache_salt", salt)
