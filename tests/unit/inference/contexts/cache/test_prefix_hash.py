"""Hashes of whole blocks, each standing for all before it."""

import hashlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache import hashing as prefix_hash
from mambaslots.inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain

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
    assert (chain.keys, chain.tokens) == by_hand(tokens, block, root)
    assert all(0 < key < 2**63 for key in chain.keys)
    assert chain.root == root


@given(tokens=token_lists, block=st.integers(1, 5))
def test_without_a_salt_keys_are_the_same_in_every_process(tokens, block):
    chain = PrefixHashChain(block)
    chain.extend_to(tokens)
    assert (chain.keys, chain.tokens) == by_hand(tokens, block)


@given(tokens=token_lists, block=st.integers(1, 5), data=st.data())
def test_appended_blocks_hash_as_those_of_a_sequence(tokens, block, data):
    whole, chain = chain_of(tokens, block, ROOT), PrefixHashChain(block, ROOT)
    first = data.draw(st.integers(0, len(whole.keys)))
    chain.extend_to(tokens, first * block)
    for content in whole.tokens[first:]:
        chain.append(content)
    assert (chain.keys, chain.tokens) == (whole.keys, whole.tokens)
    chain.extend_to(tokens * 2)
    assert (chain.keys, chain.tokens) == by_hand(tokens * 2, block, ROOT)


@given(tokens=token_lists, block=st.integers(1, 5), data=st.data())
def test_growing_a_chain_gives_what_hashing_at_once_gives(tokens, block, data):
    chain = PrefixHashChain(block)
    for length in sorted(data.draw(st.lists(st.integers(0, len(tokens) + 6), max_size=4))):
        chain.extend_to(tokens, length)
        assert chain.keys == by_hand(tokens[:length], block)[0]
    chain.extend_to(tokens)
    assert (chain.keys, chain.tokens) == by_hand(tokens, block)


def test_a_chain_never_shrinks():
    chain = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    chain.extend_to([1, 2, 3, 4], 4)
    assert len(chain.keys) == 2


def test_a_length_past_the_sequence_hashes_nothing_past_it():
    tokens = list(range(12))
    chain = PrefixHashChain(4)
    chain.extend_to(tokens[:10], 40)
    assert (chain.keys, chain.tokens) == by_hand(tokens[:10], 4)
    chain.extend_to(tokens, 40)
    assert (chain.keys, chain.tokens) == by_hand(tokens, 4)


def test_a_partial_block_has_no_hash():
    assert chain_of([1, 2, 3]).keys == []
    assert len(chain_of([1, 2, 3, 4, 5]).keys) == 1


def test_one_other_token_changes_all_hashes_from_there_on():
    left, right = (
        chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        chain_of([1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11, 12]),
    )
    assert [a == b for a, b in zip(left.keys, right.keys, strict=True)] == [True, False, False]
    assert left.tokens[2] == right.tokens[2]


def test_equal_tokens_under_other_roots_share_no_hash():
    roots = [PUBLIC_ROOT, ROOT, bytes(32), bytes(31) + b"\1"]
    assert len({chain_of([1, 2, 3, 4], root=root).keys[0] for root in roots}) == len(roots)


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_any_sequence_of_token_ids_hashes_alike(kind):
    tokens = [7, 0, 255, 50_000]
    assert chain_of(kind(tokens)).keys == chain_of(tokens).keys


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
    assert chain_of([1, 2, 3, 4]).keys == [1]


def test_a_block_whose_hashing_was_interrupted_is_hashed_anew():
    chain, whole = PrefixHashChain(4, ROOT), PrefixHashChain(4, ROOT)
    whole.extend_to(range(8))
    chain.extend_to(range(4))
    chain.keys.append(17)  # what an interrupt between two of its lists leaves
    chain.extend_to(range(8))
    assert (chain.keys, chain.tokens) == (whole.keys, whole.tokens)
