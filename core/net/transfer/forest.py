"""The prefixes of an export as trees of token blocks, without their tensors."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain
from ...validation import shown
from .format import TransferError

TOKEN_BYTES = 4
"""Bytes of a token id, little-endian, as the KV index keeps it."""


@dataclass(frozen=True, eq=False)
class PrefixForest:
    """Trees whose nodes 0 .. n-1 are blocks; a path from a root is a prefix. Parents come before children.

    Attributes:
        block_size_tokens: tokens of a block.
        roots: the root digests of the prefixes' hash chains, each once; see `SaltKey.root`. No salts.
        salt_key_id: of the key that made the roots, or empty where no prefix has a salt.
        parents: node -> the node before it in the prefix; -1 - i for the first block under `roots[i]`.
        tokens: node -> the bytes of its token ids, `TOKEN_BYTES` each.
        states: the nodes whose state is exported, the most recently used state first. Every leaf is among
            them.
    """

    block_size_tokens: int
    roots: tuple[bytes, ...]
    salt_key_id: str
    parents: tuple[int, ...]
    tokens: tuple[bytes, ...]
    states: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The nodes without children: each ends a prefix that no other prefix continues."""
        return frozenset(range(len(self))) - frozenset(self.parents)

    def under_other_key(self, salt_key_id: str) -> frozenset[int]:
        """The nodes of prefixes with salts, where their roots were made under another key than this one."""
        if self.salt_key_id in ("", salt_key_id):
            return frozenset()
        found: set[int] = set()
        for node, parent in enumerate(self.parents):
            if parent in found or (parent < 0 and self.roots[-1 - parent] != PUBLIC_ROOT):
                found.add(node)
        return frozenset(found)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Node -> the hash of the prefix that ends there, computed from root and tokens."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        size, keys = self.block_size_tokens, [0] * len(self)
        for index, root in enumerate(self.roots):
            chain = PrefixHashChain(size, root)
            waiting = [(node, 0) for node in children.get(-1 - index, ())]
            while waiting:
                node, depth = waiting.pop()
                chain.cut_to(depth * size)
                chain.append(self.tokens[node])
                keys[node] = chain.keys[-1]
                waiting += [(child, depth + 1) for child in children.get(node, ())]
        return tuple(keys)

    @cached_property
    def digest(self) -> str:
        """Equal for two forests whose nodes, order and states are equal."""
        roots = self.salt_key_id, [root.hex() for root in self.roots]
        shape = json.dumps([self.block_size_tokens, roots, self.parents, self.states])
        return hashlib.sha256(shape.encode() + b"\0" + b"".join(self.tokens)).hexdigest()

    def check(self, vocab_size: int) -> None:
        """TransferError unless the forest is as the class says and all tokens are below `vocab_size`."""
        nodes, width = len(self), self.block_size_tokens * TOKEN_BYTES
        if len(set(self.roots)) < len(self.roots):
            raise TransferError("the export names a root twice")
        if any(len(root) != len(PUBLIC_ROOT) for root in self.roots):
            raise TransferError(f"the export names a root that is not of {len(PUBLIC_ROOT)} bytes")
        has_salts = set(self.roots) - {PUBLIC_ROOT}
        if not isinstance(self.salt_key_id, str) or bool(self.salt_key_id) != bool(has_salts):
            raise TransferError(
                f"salt_key_id is {shown(self.salt_key_id)}; accepted: a str, empty where no prefix has a salt"
            )
        for node, parent in enumerate(self.parents):
            if not -len(self.roots) <= parent < node:
                raise TransferError(
                    f"parents[{node}] is {parent}; accepted: an earlier node, or from {-len(self.roots)} to "
                    "-1 for one of the roots"
                )
        wrong = next((node for node, content in enumerate(self.tokens) if len(content) != width), None)
        if len(self.tokens) != nodes or wrong is not None:
            raise TransferError(f"tokens are those of other blocks; accepted: {nodes} times {width} bytes")
        largest = np.frombuffer(b"".join(self.tokens), dtype="<u4").max(initial=0)
        if largest >= vocab_size:
            raise TransferError(f"a token is {largest}; accepted: from 0 to {vocab_size - 1}")
        if len(set(zip(self.parents, self.tokens, strict=True))) < nodes:
            raise TransferError("the export holds a block twice")
        if len(set(self.states)) < len(self.states) or not all(0 <= node < nodes for node in self.states):
            raise TransferError(f"states is {shown(self.states)}; accepted: distinct nodes below {nodes}")
        if not self.leaves <= set(self.states):
            raise TransferError("the export holds blocks below the deepest state of their prefix")
