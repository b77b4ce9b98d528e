"""Copies of states in pinned host memory, and the tiers that a configuration asks for."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...devices import GIGABYTE, on_device_of
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX
from .cache.state_tiers import StateCopies, StateTiers
from .request_states import StatePool
from .row_checksum import RowChecksum
from .state_files import StateFiles

NUM_STAGED = 2  # staging places on the device, so that no step waits for the bus


class HostCopies(StateCopies):
    """Copies states between durable slots and slots of host memory; on a CPU, plain copies.

    `store` copies twice: on the step's stream to a staging place, after which the slot may be written; from
    there to pinned memory, on this object's stream. Only the device waits, for more than `NUM_STAGED` states.
    A checksum of each staged state stays on the device, and is computed again after `fetch`: it covers the
    bus, host memory, the disk and the serial number.
    """

    def __init__(
        self, num_slots: int, state_bytes: int, bytes_of: Callable[[int], Tensor], device: torch.device,
        files: StateFiles | None = None, scrubs: bool = False,
    ) -> None:  # fmt: skip
        """`bytes_of`: of a durable slot, now; `scrubs`: zero staging places. MemoryError: cannot pin."""
        self._device = device
        self._bytes_of = bytes_of
        self._files = files
        self._state_bytes = state_bytes
        self._scrubs = scrubs
        self._stream = _new_stream(device)
        self._checksum = RowChecksum(state_bytes, device)
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            new = torch.zeros if scrubs else torch.empty
            self.memory = new(num_slots, state_bytes, dtype=torch.uint8)
            self._sums = torch.zeros(num_slots, dtype=torch.int64, device=device)
            self._sums_for_files = torch.zeros(num_slots, dtype=torch.int64) if files is not None else None
        if self._stream is not None:
            _pin(self.memory)
            if self._sums_for_files is not None:
                self._sums_for_files = self._sums_for_files.pin_memory()
            weakref.finalize(self, _unpin, self.memory, self._stream)
        self._versions = [0] * num_slots  # grows with each write to a host slot
        self._stored: dict[int, torch.cuda.Event] = {}
        self._staged: Tensor | None = None
        self._zeros: Tensor | None = None  # [state_bytes] on the device
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_STAGED
        self._next_stage = 0

    # ---- out

    def store(self, slot: int, host_slot: int, serial: int) -> None:
        self._versions[host_slot] += 1
        state = self._bytes_of(slot)
        if self._stream is None:
            self._copy_to_host(state, host_slot, serial)
            return
        with on_device_of(self._device):
            stage = self._next_stage
            self._next_stage = (stage + 1) % NUM_STAGED
            step, copied = torch.cuda.current_stream(self._device), self._copied[stage]
            if copied is not None:
                step.wait_event(copied)
            staged = self._stages()[stage]
            staged.copy_(state)
            self._stream.wait_event(step.record_event())
            try:
                with torch.cuda.stream(self._stream):
                    self._copy_to_host(staged, host_slot, serial)
                    if self._scrubs:
                        staged.zero_()
            finally:  # a call that fails may have launched a copy
                self._copied[stage] = self._stored[host_slot] = self._stream.record_event()

    def _copy_to_host(self, state: Tensor, host_slot: int, serial: int) -> None:
        self.memory[host_slot].copy_(state, non_blocking=True)
        self._sums[host_slot] = self._checksum(state, serial)
        if self._sums_for_files is not None:
            self._sums_for_files[host_slot].copy_(self._sums[host_slot], non_blocking=True)

    def _stages(self) -> Tensor:
        if self._staged is None:
            with torch.inference_mode(False):
                self._staged = torch.empty(
                    NUM_STAGED, self._state_bytes, dtype=torch.uint8, device=self._device
                )
        return self._staged

    def deallocate_staging(self) -> None:
        self._synchronise()
        self._staged = self._zeros = None

    def zero(self, host_slots: Sequence[int]) -> None:
        """Zero host slots, after the copies under way; does not wait. No file is written of such a slot."""
        for host_slot in host_slots:
            self._versions[host_slot] += 1
        if self._stream is None:
            for host_slot in host_slots:
                self.memory[host_slot].zero_()
            return
        with on_device_of(self._device), torch.cuda.stream(self._stream):
            if self._zeros is None:
                with torch.inference_mode(False):
                    self._zeros = torch.zeros(self._state_bytes, dtype=torch.uint8, device=self._device)
            for host_slot in host_slots:
                self.memory[host_slot].copy_(self._zeros, non_blocking=True)

    # ---- back

    def fetch(self, host_slot: int, slot: int, serial: int) -> bool:
        state = self._bytes_of(slot)
        if self._stream is None:
            return self._copy_back(state, host_slot, serial)
        with on_device_of(self._device):
            step = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(step)  # a step may still read what the slot held
            try:
                with torch.cuda.stream(self._stream):
                    return self._copy_back(state, host_slot, serial)
            finally:  # a call that fails may have launched a copy, and the slot is used again
                step.wait_stream(self._stream)

    def _copy_back(self, state: Tensor, host_slot: int, serial: int) -> bool:
        state.copy_(self.memory[host_slot], non_blocking=True)
        return bool(self._checksum(state, serial) == self._sums[host_slot])

    # ---- files

    def save(self, host_slot: int, file: int, serial: int) -> None:
        """Write a host slot to a file once it is complete; no file where it is overwritten before."""
        if self._files is not None and self._sums_for_files is not None:
            versions, version = self._versions, self._versions[host_slot]
            sums, stored = self._sums_for_files, self._stored.get(host_slot)

            def checksum() -> int | None:
                if stored is not None:
                    stored.synchronize()
                value = int(sums[host_slot])
                return value if versions[host_slot] == version else None

            self._files.save(file, serial, self.memory[host_slot], checksum)

    def load(self, file: int, host_slot: int, serial: int) -> bool:
        if self._files is None:
            return False
        self._synchronise()
        self._versions[host_slot] += 1
        if (checksum := self._files.load(file, serial, self.memory[host_slot])) is None:
            return False
        self._sums[host_slot] = checksum
        if self._sums_for_files is not None:
            self._sums_for_files[host_slot] = checksum
        return True

    def delete(self, files: Sequence[int] | None) -> None:
        if self._files is not None:
            self._files.delete(files)

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _pin(memory: Tensor) -> None:
    """Pin host memory; torch's own pinned memory is rounded up to a power of two."""
    if memory.numel():
        error = _runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            raise MemoryError(f"{memory.numel()} bytes cannot be pinned: CUDA error {int(error)}")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unpin(memory: Tensor, stream: torch.cuda.Stream) -> None:
    with suppress(Exception):
        stream.synchronize()  # a copy may still be under way
        if memory.numel():
            _runtime().cudaHostUnregister(memory.data_ptr())


def tiers_of(config: InferenceConfig, spec: HybridStateSpec, pool: StatePool) -> StateTiers | None:
    """Host memory and files for the durable states of a pool; None without `host_cache_gb`. A collective.

    A pool whose slots have no bytes gets indexes alone. ValueError, the same on all ranks, for a budget that
    buys no state, or memory or a directory that cannot be had.
    """
    state_bytes = pool.memory.shape[1] or spec.slot_bytes
    disk_path, disk_gb = config.disk_cache or ("", 0.0)
    budgets = {"host_cache_gb": config.host_cache_gb, "disk_cache[1]": disk_gb}
    sizes, refusal = [], ""
    for name, gb in budgets.items():
        affordable = int(min(gb * GIGABYTE, INT32_MAX * max(1, state_bytes))) // max(1, state_bytes)
        if gb and not affordable:
            refusal = f"{name} is {gb}; accepted: at least {state_bytes / GIGABYTE:.3g}, one state"
        sizes.append(affordable if state_bytes or not gb else INT32_MAX)  # a stage without states: any number
    ranks = spec.groups.gather((*sizes, refusal, state_bytes), spec.device)
    slots, file_counts, refusals, state_sizes = zip(*ranks, strict=True)
    num_slots, num_files, largest = min(slots), min(file_counts), max(state_sizes)
    refusal = next(filter(None, refusals), "")
    if not ((num_slots and largest) or refusal):
        return None
    copies = None
    scrubs = config.free_memory == "zero"
    if pool.memory.shape[1] and not refusal:
        try:
            model = f"{spec.model} {pool.states} {spec.shard} {config.block_size_tokens}"
            files = StateFiles(disk_path, state_bytes, model, scrubs) if num_files else None
            copies = HostCopies(
                num_slots, state_bytes, lambda slot: pool.memory[pool.durable_index(slot)], spec.device,
                files, scrubs,
            )  # fmt: skip
        except (OSError, MemoryError, RuntimeError) as error:
            refusal = f"host_cache_gb is {config.host_cache_gb}, disk_cache is {config.disk_cache}; "
            refusal += f"accepted: what this machine has room for: {error}"
    spec.groups.raise_first(refusal, spec.device)
    groups, device = spec.groups, spec.device
    return StateTiers(
        num_slots, copies, num_files=num_files, agree=lambda good: bool(groups.least(int(good), device)),
        scrubs=scrubs, state_bytes=largest,
    )  # fmt: skip
