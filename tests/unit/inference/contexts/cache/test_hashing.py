"""Hashes of prefixes, and the roots of chains under salts."""

import hashlib
import hmac
import secrets
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache import hashing as prefix_hash
from mambaslots.inference.contexts.cache.hashing import (
    ENVIRONMENT_NAME,
    PUBLIC_ROOT,
    PrefixHashChain,
    SaltKey,
    given_key,
    key_bytes,
    salt_bytes,
)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)


ROOT = hashlib.sha256(b"another").digest()


def by_hand(tokens, block, root=None):
    digest = hashlib.sha256(b"mambaslots.root\0").digest() if root is None else root
    keys, contents = [], []
    for first in range(0, len(tokens) - block + 1, block):
        content = b"".join(struct.pack("<I", token) for token in tokens[first : first + block])
        digest = hashlib.sha256(digest + content).digest()
        keys.append(int("".join(f"{byte:08b}" for byte in digest)[:63], 2))
        contents.append(content)
    return keys, contents


def chain_of(tokens, block=4, root=PUBLIC_ROOT):
    chain = PrefixHashChain(block, root)
    chain.extend_to(tokens)
    return chain


@given(tokens=token_lists, block=st.integers(1, 5), root=st.binary(min_size=32, max_size=32))
def test_keys_and_tokens_are_those_of_a_chain_written_by_hand(tokens, block, root):
    chain = chain_of(tokens, block, root)
    assert (chain.hashes, chain.tokens) == by_hand(tokens, block, root)
    assert all(0 < key < 2**63 for key in chain.hashes)
    assert chain.root == root


@given(tokens=token_lists, block=st.integers(1, 5))
def test_without_a_salt_keys_are_the_same_in_every_process(tokens, block):
    chain = PrefixHashChain(block)
    chain.extend_to(tokens)
    assert (chain.hashes, chain.tokens) == by_hand(tokens, block)


@given(tokens=token_lists, block=st.integers(1, 5), data=st.data())
def test_appended_blocks_hash_as_those_of_a_sequence(tokens, block, data):
    whole, chain = chain_of(tokens, block, ROOT), PrefixHashChain(block, ROOT)
    first = data.draw(st.integers(0, len(whole.hashes)))
    chain.extend_to(tokens, first * block)
    for content in whole.tokens[first:]:
        chain.append(content)
    assert (chain.hashes, chain.tokens) == (whole.hashes, whole.tokens)
    chain.extend_to(tokens * 2)
    assert (chain.hashes, chain.tokens) == by_hand(tokens * 2, block, ROOT)


@given(tokens=token_lists, block=st.integers(1, 5), data=st.data())
def test_growing_a_chain_gives_what_hashing_at_once_gives(tokens, block, data):
    chain = PrefixHashChain(block)
    for length in sorted(data.draw(st.lists(st.integers(0, len(tokens) + 6), max_size=4))):
        chain.extend_to(tokens, length)
        assert chain.hashes == by_hand(tokens[:length], block)[0]
    chain.extend_to(tokens)
    assert (chain.hashes, chain.tokens) == by_hand(tokens, block)


def test_a_chain_never_shrinks():
    chain = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    chain.extend_to([1, 2, 3, 4], 4)
    assert len(chain.hashes) == 2


def test_a_length_past_the_sequence_hashes_nothing_past_it():
    tokens = list(range(12))
    chain = PrefixHashChain(4)
    chain.extend_to(tokens[:10], 40)
    assert (chain.hashes, chain.tokens) == by_hand(tokens[:10], 4)
    chain.extend_to(tokens, 40)
    assert (chain.hashes, chain.tokens) == by_hand(tokens, 4)


def test_a_partial_block_has_no_hash():
    assert chain_of([1, 2, 3]).hashes == []
    assert len(chain_of([1, 2, 3, 4, 5]).hashes) == 1


def test_one_other_token_changes_all_hashes_from_there_on():
    left, right = (
        chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        chain_of([1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11, 12]),
    )
    assert [a == b for a, b in zip(left.hashes, right.hashes, strict=True)] == [True, False, False]
    assert left.tokens[2] == right.tokens[2]


def test_equal_tokens_under_other_roots_share_no_hash():
    roots = [PUBLIC_ROOT, ROOT, bytes(32), bytes(31) + b"\1"]
    assert len({chain_of([1, 2, 3, 4], root=root).hashes[0] for root in roots}) == len(roots)


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_any_sequence_of_token_ids_hashes_alike(kind):
    tokens = [7, 0, 255, 50_000]
    assert chain_of(kind(tokens)).hashes == chain_of(tokens).hashes


def test_only_new_tokens_are_hashed(monkeypatch):
    hashed = []

    def sha256(content):
        hashed.append(len(content))
        return hashlib.sha256(content)

    monkeypatch.setattr(prefix_hash, "hashlib", SimpleNamespace(sha256=sha256))
    chain = chain_of(list(range(400)))
    hashed.clear()
    chain.extend_to(list(range(408)))
    assert hashed == [32 + 16] * 2


def test_a_hash_of_zero_becomes_one(monkeypatch):
    zeros = SimpleNamespace(digest=lambda: bytes(32))
    monkeypatch.setattr(prefix_hash, "hashlib", SimpleNamespace(sha256=lambda content: zeros))
    assert chain_of([1, 2, 3, 4]).hashes == [1]


def test_a_block_whose_hashing_was_interrupted_is_hashed_anew():
    chain, whole = PrefixHashChain(4, ROOT), PrefixHashChain(4, ROOT)
    whole.extend_to(range(8))
    chain.extend_to(range(4))
    chain.hashes.append(17)  # what an interrupt between two of its lists leaves
    chain.extend_to(range(8))
    assert (chain.hashes, chain.tokens) == (whole.hashes, whole.tokens)


KEY, OTHER = b"k" * 16, b"o" * 16


def test_the_root_is_the_hmac_of_the_salt_and_nothing_else() -> None:
    root = SaltKey(KEY).root(b"tenant")
    assert root == hmac.new(KEY, b"mambaslots.salt\0tenant", hashlib.sha256).digest()
    assert SaltKey(KEY).root(b"tenant") == root
    assert len({root, SaltKey(OTHER).root(b"tenant"), SaltKey(KEY).root(b"tenan"), PUBLIC_ROOT}) == 4


def test_without_a_salt_every_key_gives_the_public_root() -> None:
    assert SaltKey(KEY).root(None) == SaltKey(OTHER).root(None) == PUBLIC_ROOT


def test_an_id_distinguishes_keys_and_shows_none() -> None:
    ids = {SaltKey(key).key_id for key in (KEY, KEY, OTHER, secrets.token_bytes(32), secrets.token_bytes(32))}
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
