"""The memory of a step: what a model may read is real, the rest is poisoned, and its writes are checked."""

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..validation import ceil_div
from .rules import ModelError, Rule


class StepMemory:
    """The states and KV of one step, poisoned where the step does not read.

    Attributes:
        slots: state slot -> the token after which the step stores a state there.
        places: place in the KV cache, block * block size + offset -> the token whose KV is stored there.
    """

    def __init__(self, inputs: StepInputs) -> None:
        chunks = inputs.chunks
        checkpoints = inputs.checkpoints
        num_decoded = inputs.num_decode_tokens
        stops = torch.cat([chunks.query_start_loc[1:], chunks.cu_chunk_seqlens[1:], checkpoints.token_ends])
        ends = [*range(num_decoded), *(num_decoded + stop - 1 for stop in stops.tolist())]
        slots = torch.cat([inputs.state_destinations, chunks.destinations, checkpoints.destinations]).tolist()
        places = zip(inputs.kv_write_positions.tolist(), inputs.kv_write_tokens.tolist(), strict=True)
        self.slots = {slot: token for slot, token in zip(slots, ends, strict=True) if slot >= 0}
        self.places = {place: token for place, token in places if place >= 0}
        self._inputs = inputs
        self._names = [tensor.name for tensor in inputs.state_pool.states]
        self._pools = [*inputs.state_pool.tensors, inputs.kv_cache]
        self._originals = [pool.clone() for pool in self._pools]
        self._poison()
        self._poisoned = [pool.clone() for pool in self._pools]

    def _poison(self) -> None:
        """Fill all states but sources with NaN, and all KV but that of earlier tokens.

        Blocks with stored KV get the largest finite number: kernels may multiply it by 0.
        """
        *states, kv = self._pools
        is_free = torch.ones(states[0].shape[1], dtype=torch.bool, device=kv.device)
        is_free[[source for source in self._inputs.state_sources.tolist() if source >= 0]] = False
        for pool in states:
            pool[:, is_free] = float("nan")
        size = kv.shape[3]
        num_stored = [0] * kv.shape[2]  # of each block: its leading rows whose KV is stored
        rows = zip(self._inputs.block_table.tolist(), self._inputs.kv_lengths.tolist(), strict=True)
        for table, length in rows:
            for index, block in enumerate(table[: ceil_div(length, size)]):
                places = range(block * size, block * size + min(size, length - index * size))
                count = sum(place not in self.places for place in places)
                num_stored[block] = max(count, num_stored[block])
        for block, count in enumerate(num_stored):  # kernels may multiply blocks with stored KV by 0
            kv[:, :, block, count:] = torch.finfo(kv.dtype).max if count else float("nan")

    def restore(self) -> None:
        """Undo the poison; a ModelError for a change of memory that is no destination of the step."""
        *states, kv = self._pools
        slots = torch.ones(states[0].shape[1], dtype=torch.bool, device=kv.device)
        slots[list(self.slots)] = False
        rows = torch.ones(kv.shape[2:4], dtype=torch.bool, device=kv.device)
        rows.view(-1)[list(self.places)] = False
        size = kv.shape[3]
        block_begins = torch.zeros_like(rows)
        block_begins[[place // size for place in self.places if place % size == 0]] = True
        for index, (name, pool) in enumerate(zip(self._names, states, strict=True)):
            if _differ(pool[:, slots], self._poisoned[index][:, slots]).any():
                message = f"the model writes {name!r} of slots that are no destinations of the step"
                raise ModelError(Rule.FOREIGN_WRITE, message)
            pool[:, slots] = self._originals[index][:, slots]
        is_written = _differ(kv[:, :, rows], self._poisoned[-1][:, :, rows])
        begins_block = block_begins[rows][:, None, None]
        is_written &= (kv[:, :, rows] != 0) | ~begins_block  # zeros may follow the last token
        if is_written.any():
            raise ModelError(Rule.FOREIGN_WRITE, "the model writes KV that is not at kv_write_positions")
        kv[:, :, rows] = self._originals[-1][:, :, rows]


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Where two tensors have other numbers; NaN is NaN."""
    return ~torch.isclose(old, new, rtol=0.0, atol=0.0, equal_nan=True)
