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
        chunks, checkpoints, decoded = inputs.chunks, inputs.checkpoints, inputs.num_decode_tokens
        stops = torch.cat([chunks.query_start_loc[1:], chunks.cu_chunk_seqlens[1:], checkpoints.token_ends])
        ends = [*range(decoded), *(decoded + stop - 1 for stop in stops.tolist())]
        slots = torch.cat([inputs.state_destinations, chunks.destinations, checkpoints.destinations]).tolist()
        places = zip(inputs.kv_write_positions.tolist(), inputs.kv_write_tokens.tolist(), strict=True)
        self.slots = {slot: token for slot, token in zip(slots, ends, strict=True) if slot >= 0}
        self.places = {place: token for place, token in places if place >= 0}
        self._inputs = inputs
        self._names = [tensor.name for tensor in inputs.state_pool.states]
        self._pools = [*inputs.state_pool.tensors, inputs.kv_cache]
        self._own = [pool.clone() for pool in self._pools]
        self._poison()
        self._before = [pool.clone() for pool in self._pools]

    def _poison(self) -> None:
        """Fill all states but sources with NaN, and all KV but that of earlier tokens.

        Blocks with stored KV get the largest finite number: kernels may multiply it by 0.
        """
        *states, kv = self._pools
        free = torch.ones(states[0].shape[1], dtype=torch.bool, device=kv.device)
        free[[source for source in self._inputs.state_sources.tolist() if source >= 0]] = False
        for pool in states:
            pool[:, free] = float("nan")
        size = kv.shape[3]
        num_stored = [0] * kv.shape[2]  # of each block: its leading rows whose KV is stored
        rows = zip(self._inputs.block_table.tolist(), self._inputs.kv_lengths.tolist(), strict=True)
        for table, length in rows:
            for index, block in enumerate(table[: ceil_div(length, size)]):
                known = range(block * size, block * size + min(size, length - index * size))
                stored = sum(place not in self.places for place in known)
                num_stored[block] = max(stored, num_stored[block])
        for block, stored in enumerate(num_stored):
            kv[:, :, block, stored:] = torch.finfo(kv.dtype).max if stored else float("nan")

    def restore(self) -> None:
        """Undo the poison; a ModelError for a change of memory that is no destination of the step."""
        *states, kv = self._pools
        slots = torch.ones(states[0].shape[1], dtype=torch.bool, device=kv.device)
        slots[list(self.slots)] = False
        rows = torch.ones(kv.shape[2:4], dtype=torch.bool, device=kv.device)
        rows.view(-1)[list(self.places)] = False
        size = kv.shape[3]
        begun = torch.zeros_like(rows)
        begun[[place // size for place in self.places if place % size == 0]] = True
        for name, pool, before, own in zip(self._names, states, self._before, self._own, strict=False):
            if _differ(pool[:, slots], before[:, slots]).any():
                message = f"the model writes {name!r} of slots that are no destinations of the step"
                raise ModelError(Rule.FOREIGN_WRITE, message)
            pool[:, slots] = own[:, slots]
        written = _differ(kv[:, :, rows], self._before[-1][:, :, rows])
        written &= (kv[:, :, rows] != 0) | ~begun[rows][:, None, None]  # zeros may follow the last token
        if written.any():
            raise ModelError(Rule.FOREIGN_WRITE, "the model writes KV that is not at kv_write_positions")
        kv[:, :, rows] = self._own[-1][:, :, rows]


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Where two tensors have other numbers; NaN is NaN."""
    return ~torch.isclose(old, new, rtol=0.0, atol=0.0, equal_nan=True)
