"""What a source offers to another replica: the prefixes that it could send, without their tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...model_shard import Part
from ...validation import integers, shown
from .cache_access import CacheAccess
from .codec import decode_prefixes, encode_prefixes
from .export import PrefixName, chosen_states, forest_of
from .forest import PrefixForest
from .format import PrefixFormat, TransferError
from .parts import Shard, TensorPart, shard_of
from .shard import PrefixShard, shapes_of

STATES = ("deepest", "all")


@dataclass(frozen=True, eq=False)
class Offer:
    """Cached prefixes of a source, and where they are.

    Attributes:
        form: the format of the source's cache.
        forest: the prefixes.
        blocks: node -> block.
        slots: node -> slot, of `forest.states`.
        split: the sizes of the tensor group and of the pipeline group.
    """

    form: PrefixFormat
    forest: PrefixForest
    blocks: list[int]
    slots: dict[int, int]
    split: tuple[int, int]

    @classmethod
    def of(cls, access: CacheAccess, prefixes: Iterable[PrefixName] | None, states: str) -> "Offer":
        """The offer of `chosen_states`; ValueError as in `export_prefixes`, and for other `states`."""
        if not isinstance(states, str) or states not in STATES:
            raise ValueError(f"states is {shown(states)}; accepted: one of {', '.join(STATES)}")
        form = PrefixFormat.of(access)
        state_slots = chosen_states(access, prefixes, states)
        blocks, forest = forest_of(access, list(state_slots))
        slots = dict(zip(forest.states, state_slots.values(), strict=True))
        return cls(form, forest, blocks, slots, (access.parallel.tensor_size, access.parallel.pipeline_size))

    def to_bytes(self, shard: Shard) -> bytes:
        """An encoded export of no layer and no unit: checked as every export, by a checksum and by hashes."""
        nothing = {
            name: TensorPart(Part(0, 0, part.layers.total), Part(0, 0, part.units.total))
            for name, part in shard.items()
        }
        tensors = {
            name: torch.empty(shape, dtype=self.form.tensors[name].dtype, device="cpu")
            for name, shape in shapes_of(self.form, self.forest, nothing).items()
        }
        return encode_prefixes(PrefixShard(self.form, self.forest, nothing, self.split, tensors))

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
    offers = [decode_prefixes(message) for message in messages]
    for index, offer in enumerate(offers):
        offer.format.check_fits(own)
        if offer.shard.keys() != shard_of(access.spec).keys():
            raise TransferError(
                f"offer {index} is of {sorted(offer.shard)}; accepted: the tensors of this engine"
            )
        if offer.forest.digest != offers[0].forest.digest:
            raise TransferError(
                f"offer {index} has other prefixes than offer 0; accepted: the same of all ranks"
            )
    return offers[0].format, offers[0].forest
