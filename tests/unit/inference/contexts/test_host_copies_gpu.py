"""Copies between a GPU and pinned memory: the bytes, the order of streams, and the checksums."""

import pytest
import torch
from mambaslots.inference.contexts.row_checksum import RowChecksum
from mambaslots.inference.contexts.tier_copies import NUM_STAGED, HostCopies

pytestmark = pytest.mark.gpu

BYTES, SLOTS = 1 << 22, 6


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def made(device: torch.device) -> tuple[torch.Tensor, HostCopies]:
    generator = torch.Generator(device).manual_seed(1)
    shape = SLOTS, BYTES
    memory = torch.randint(0, 255, shape, dtype=torch.uint8, device=device, generator=generator)
    return memory, HostCopies(SLOTS, BYTES, memory.__getitem__, device)


def test_the_checksum_is_that_of_a_cpu(device: torch.device) -> None:
    row = torch.randint(0, 255, (BYTES + 8 * 77,), dtype=torch.uint8)
    on_cpu = RowChecksum(len(row), torch.device("cpu"))(row, 12)
    assert int(RowChecksum(len(row), device)(row.to(device), 12)) == int(on_cpu)


def test_a_slot_may_be_written_as_soon_as_its_state_has_left(device: torch.device) -> None:
    """More states leave at once than are put aside; each slot is overwritten in stream order behind it."""
    memory, copies = made(device)
    before = memory.clone()
    assert SLOTS > NUM_STAGED
    torch.cuda._sleep(20_000_000)  # the device is behind: no copy has begun when the writes are launched
    for slot in range(SLOTS):
        copies.store(slot, slot, slot + 1)
        memory[slot] = 255
    for slot in range(SLOTS):
        place = (slot + 1) % SLOTS
        assert copies.fetch(slot, place, slot + 1)
        assert torch.equal(memory[place], before[slot])
    torch.cuda.synchronize()
    assert torch.equal(copies.memory, before.cpu())


def test_a_state_is_there_before_the_step_that_reads_it_and_behind_the_step_that_read_the_slot(
    device: torch.device,
) -> None:
    memory, copies = made(device)
    before = memory.clone()
    copies.store(0, 0, 1)
    torch.cuda._sleep(20_000_000)
    read = memory[1].clone()  # a step that still reads what the slot held
    assert copies.fetch(0, 1, 1)
    after = memory[1].clone()
    assert torch.equal(read, before[1])
    assert torch.equal(after, before[0])


def test_a_byte_that_changes_in_host_memory_is_found(device: torch.device) -> None:
    _, copies = made(device)
    copies.store(0, 0, 1)
    copies.store(1, 1, 2)
    torch.cuda.synchronize()
    assert not copies.fetch(0, 3, 2)
    copies.memory[0, BYTES - 1] ^= 4
    assert not copies.fetch(0, 3, 1)
    assert copies.fetch(1, 3, 2)


def test_other_streams_than_the_default_one_are_followed(device: torch.device) -> None:
    memory, copies = made(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        memory[2] = 9
        copies.store(2, 2, 5)
        memory[2] = 1
        assert copies.fetch(2, 4, 5)
        assert bool((memory[4] == 9).all())


def test_device_memory_comes_back_on_demand(device: torch.device) -> None:
    memory, copies = made(device)
    copies.store(0, 0, 1)
    copies.deallocate_staging()
    copies.store(1, 1, 2)
    assert copies.fetch(0, 2, 1)
    assert copies.fetch(1, 3, 2)
    assert torch.equal(memory[2], memory[0])
