"""What a source offers to another replica: the prefixes that it could send, without their tensors."""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...validation import integer, integers, shown
from .cache_access import CacheAccess
from .export import PrefixName, chosen_states, forest_of
from .forest import TOKEN_BYTES, PrefixForest
from .format import PrefixFormat, TransferError
from .parts import json_object

_LENGTHS = struct.Struct("<QQ")  # the bytes of the description, and the number of nodes
STATES = ("deepest", "all")


@dataclass(frozen=True, eq=False)
class Offer:
    """Cached prefixes of a source, and where they are.

    Attributes:
        form: the format of the source's cache.
        forest: the prefixes.
        blocks: node -> block.
        slots: node -> slot, of `forest.states`.
    """

    form: PrefixFormat
    forest: PrefixForest
    blocks: list[int]
    slots: dict[int, int]

    @classmethod
    def of(cls, access: CacheAccess, prefixes: Iterable[PrefixName] | None, states: str) -> "Offer":
        """The offer of `chosen_states`; ValueError as in `export_prefixes`, and for other `states`."""
        if not isinstance(states, str) or states not in STATES:
            raise ValueError(f"states is {shown(states)}; accepted: one of {', '.join(STATES)}")
        form = PrefixFormat.of(access)
        state_slots = chosen_states(access, prefixes, states)
        blocks, forest = forest_of(access, list(state_slots))
        slots = dict(zip(forest.states, state_slots.values(), strict=True))
        return cls(form, forest, blocks, slots)

    def to_bytes(self) -> bytes:
        """The format and the forest, under a checksum; `decode_offers` reads them."""
        forest = self.forest
        described = {
            "format": self.form.to_json(),
            "roots": [root.hex() for root in forest.roots],
            "salt_key_id": forest.salt_key_id,
            "states": len(forest.states),
        }
        text = json.dumps(described).encode()
        nodes = np.array([*forest.parents, *forest.keys, *forest.states], dtype="<i8").tobytes()
        content = b"".join((_LENGTHS.pack(len(text), len(forest)), text, nodes, *forest.tokens))
        return hashlib.sha256(content).digest() + content

    def rows_of(self, answer: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The blocks and slots that a receiver asks for by their nodes; TransferError for no such nodes."""
        nodes = {}
        for name, limit in (("blocks", len(self.forest)), ("states", len(self.forest.states))):
            try:
                found = integers(name, answer[name], 0, max(0, len(self.forest) - 1))
            except ValueError as error:
                raise TransferError(f"the receiver asks for what was not offered: {error}") from error
            if len(set(found)) < len(found) or len(found) > limit:
                raise TransferError(
                    f"the receiver asks for {len(found)} {name}; accepted: each of {limit} once"
                )
            nodes[name] = found
        unknown = set(nodes["states"]) - self.slots.keys()
        if unknown:
            raise TransferError(f"the receiver asks for states of {sorted(unknown)}; accepted: offered ones")
        return [self.blocks[node] for node in nodes["blocks"]], [self.slots[node] for node in nodes["states"]]


def decode_offers(access: CacheAccess, messages: list[bytes]) -> tuple[PrefixFormat, PrefixForest]:
    """The format and the forest that all ranks of a source offer; TransferError where offers are wrong."""
    own = PrefixFormat.of(access)
    forests = [_decoded(own, message) for message in messages]
    for index, forest in enumerate(forests):
        if forest.digest != forests[0].digest:
            raise TransferError(
                f"offer {index} has other prefixes than offer 0; accepted: the same of all ranks"
            )
    return own, forests[0]


def _decoded(own: PrefixFormat, message: bytes) -> PrefixForest:
    seal, content = message[: hashlib.sha256().digest_size], message[hashlib.sha256().digest_size :]
    if hashlib.sha256(content).digest() != seal:
        raise TransferError("the offer is truncated or altered")
    try:
        forest, keys = _forest_in(own, content)
    except TransferError:
        raise
    except Exception as error:  # a valid checksum does not make the content valid
        raise TransferError(f"the offer is malformed: {error}") from error
    forest.check(own.vocab_size)
    if keys != forest.keys:
        raise TransferError("hashes of an offer are not those of its roots and tokens")
    return forest


def _forest_in(own: PrefixFormat, content: bytes) -> tuple[PrefixForest, tuple[int, ...]]:
    """The forest in an offer, whose format must be `own`, and its nodes' hashes as the offer has them."""
    length, num_nodes = _LENGTHS.unpack_from(content)
    begin, end = _LENGTHS.size, _LENGTHS.size + length
    found = json_object("offer", json.loads(content[begin:end]), {"format", "roots", "salt_key_id", "states"})
    PrefixFormat.from_json(found["format"]).check_fits(own)
    num_states = integer("states", found["states"], 0, num_nodes)
    num_numbers, width = 2 * num_nodes + num_states, TOKEN_BYTES * own.block_size_tokens
    begin, end = end, end + 8 * num_numbers
    if len(content) != end + num_nodes * width:
        raise TransferError(f"the offer is of {len(content)} bytes; accepted: {end + num_nodes * width}")
    numbers = np.frombuffer(content[begin:end], dtype="<i8").tolist()
    forest = PrefixForest(
        block_size_tokens=own.block_size_tokens,
        roots=tuple(bytes.fromhex(root) for root in found["roots"]),
        salt_key_id=found["salt_key_id"],
        parents=tuple(numbers[:num_nodes]),
        tokens=tuple(content[first : first + width] for first in range(end, len(content), width)),
        states=tuple(numbers[2 * num_nodes :]),
    )
    return forest, tuple(numbers[num_nodes : 2 * num_nodes])
