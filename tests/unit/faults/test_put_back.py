"""Each fault of the stock cache, put back into a copy of the package, makes its test fail.

    python -m pytest tests/unit/faults/test_put_back.py -m long -v       # the table: fault, and PASSED

A fault is put back by replacing a piece of source; a piece that is no longer there fails, too, so that this
table follows the code.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTEXTS = "inference/contexts/"
POLICIES = "inference/contexts/cache/"
HOST_KV = "self.tree.host_kv"
"""How `StateSlots` can reach the host's KV allocator."""


@dataclass(frozen=True)
class PutBack:
    """Replacements (file, right, faulty) that bring a fault back; `test` picks its tests."""

    test: str
    replacements: tuple[tuple[str, str, str], ...]


FAULTS = {
    "01 the skip is rounded down to a boundary without a state": PutBack(
        "fault_01",
        (
            (
                POLICIES + "cached_states.py",
                "num_reachable = min(len(blocks), limit // size)",
                "num_reachable = min(len(blocks), min(limit, max(0, num_tokens - 2)) // size)",
            ),
        ),
    ),
    "02 a continuation chunk skips on the KV match alone": PutBack(
        "fault_02",
        (
            (
                CONTEXTS + "admission.py",
                "start = max(num_computed, match.resume_tokens)",
                "known = (match.seen_tokens - 1) // self._block_size * self._block_size\n"
                "        start = max(num_computed, known) if num_computed else match.resume_tokens",
            ),
        ),
    ),
    "03 a short suffix loses the convolution window": PutBack(
        "fault_03",
        (
            (
                "inference/kernels/reference/torch_conv.py",
                "    packed[window_starts[:, None] + taps] = carried.transpose(1, 2).to(x.dtype)\n",
                "    packed[window_starts[:, None] + taps] = carried.transpose(1, 2).to(x.dtype)\n"
                "    short = query_start_loc[1:] - query_start_loc[:-1] < width\n"
                "    packed[window_starts[short][:, None] + taps] = 0\n",
            ),
        ),
    ),
    "04 a state that is gone is resumed from all the same": PutBack(
        "fault_04",
        (
            (
                CONTEXTS + "admission.py",
                "match = self.match(request)",
                "match = request.match or self.match(request)",
            ),
            (
                POLICIES + "cached_states.py",
                "self.policy.use(slot)",
                "pass",
            ),
        ),
    ),
    "05 a second registration re-points the prefix": PutBack(
        "fault_05",
        (
            (
                POLICIES + "block_tree.py",
                "        canonical = self.match(parent, hashes, tokens)\n",
                "        canonical = []\n",
            ),
            (
                POLICIES + "block_tree.py",
                "            if prefix_hash in block_of_hash:",
                "            if False:",
            ),
        ),
    ),
    "06 the KV index is cleared and the state index is not": PutBack(
        "fault_06",
        (
            (
                POLICIES + "prefix_cache.py",
                "        self.slots.clear()  # first: no state may be findable once its block is free\n",
                "",
            ),
        ),
    ),
    "07 a reset leaves pending work": PutBack(
        "fault_07",
        (
            (
                CONTEXTS + "dynamic_context.py",
                "        self.batch = ()\n        self.uncommitted = []\n        self.admission.clear()\n",
                "        self.uncommitted = []\n        self.admission.clear()\n",
            ),
        ),
    ),
    "08 a live slot is a view of the free stack": PutBack(
        "fault_08",
        (
            (
                CONTEXTS + "admission.py",
                "            live = tuple("
                "self._cache.slots.allocate_live(self.slots_per_row, resume_slot, evict_last))\n",
                "            self._stack = getattr(self, '_stack', torch.zeros(1, dtype=torch.int32))\n"
                "            self._stack[0] = self._cache.slots.allocate_live(1)[0]\n"
                "            live = tuple(self._stack)\n",
            ),
        ),
    ),
    "09 slots are freed only if a hash of the batch is known": PutBack(
        "fault_09",
        (
            (
                CONTEXTS + "mamba_slot_allocator.py",
                "        self.slots.remove(self._checked_blocks(",
                "        if hashes_to_delete & self.slots.cached_states.state_block_of_hash.keys():\n"
                "            self.slots.remove(self._checked_blocks(",
            ),
        ),
    ),
    "10 requests without hashes take states": PutBack(
        "fault_10",
        (
            (
                CONTEXTS + "mamba_slot_allocator.py",
                'if not getattr(req, "precomputed_block_hashes", True) or stop // block <= start // block:',
                "if stop // block <= start // block:",
            ),
        ),
    ),
    "11 evicting a duplicate removes the other's entry": PutBack(
        "fault_11",
        (
            (
                POLICIES + "cached_states.py",
                "            if state_block_of_hash.setdefault(prefix_hash, block) == block:\n",
                "            if state_block_of_hash.setdefault(prefix_hash, block):\n",
            ),
        ),
    ),
    "12a a failing allocation has consumed the free slots": PutBack(
        "fault_12_a_failing",
        (
            (
                POLICIES + "state_slots.py",
                "                self.evict(num_slots - num_free, protected, cause)\n",
                "                lost, self.free_slots = self.free_slots, []\n"
                "                self.evict(num_slots - num_free, protected, cause)\n"
                "                self.free_slots = lost + self.free_slots\n",
            ),
        ),
    ),
    "12b states of blocks in use count as pinned": PutBack(
        "fault_12_states_of",
        (
            (
                POLICIES + "state_slots.py",
                "lambda slot: slot not in protected",
                f"lambda slot: not {HOST_KV}.block_ref_counts[self.cached_states.block_of(slot)]",
            ),
        ),
    ),
    "12c a commit larger than the pool raises": PutBack(
        "fault_12_a_pool",
        (
            (
                CONTEXTS + "mamba_slot_allocator.py",
                "count = min(len(blocks), self.slots.num_available) if blocks else 0",
                "count = len(blocks)",
            ),
        ),
    ),
    "13 a failing admission keeps references": PutBack(
        "fault_13",
        (
            (
                CONTEXTS + "admission.py",
                "        if stop <= start or not self._can_hold(request, match, stop):\n",
                "        if allocation is None:\n"
                "            self._cache.kv_blocks.add_references(match.blocks)\n"
                "        if stop <= start or not self._can_hold(request, match, stop):\n",
            ),
        ),
    ),
    "14 suspending frees no pool": PutBack(
        "fault_14",
        (
            (
                CONTEXTS + "device_memory.py",
                "        self.state_pool.deallocate()\n        self.durable_pool.deallocate()\n",
                "        pass\n",
            ),
        ),
    ),
    "16a chunk ends are not captured": PutBack(
        "fault_16",
        (
            (
                POLICIES + "checkpoint_plan.py",
                "if stop % block == 0:",
                "if False:",
            ),
        ),
    ),
    "16b a host's chunk ends are not captured": PutBack(
        "fault_16",
        (
            (
                CONTEXTS + "hosts/step_plan.py",
                "self.end_blocks[row] = block_at.get(stop, -1)",
                "self.end_blocks[row] = -1",
            ),
        ),
    ),
    "17 the divergence ignores the blocks of earlier chunks": PutBack(
        "fault_17",
        (
            (
                CONTEXTS + "mamba_slot_allocator.py",
                "(ceil_div(finished, block) + num_matched_blocks) * block",
                "num_matched_blocks * block",
            ),
        ),
    ),
    "18 nothing is taken while decoding": PutBack(
        "fault_18",
        ((POLICIES + "checkpoint_plan.py", 'if self.decode != "off":', "if False:"),),
    ),
    "19 a KV match refreshes states that were not used": PutBack(
        "fault_19",
        (
            (
                CONTEXTS + "admission.py",
                "        allocation.branch_tokens = self._branch_tokens(match, request)\n",
                "        slots = self._cache.slots\n"
                "        for block in match.blocks:\n"
                "            if block in slots.cached_states.slot_of_block:\n"
                "                slots.cached_states.record_use(slots.cached_states.slot_of(block))\n"
                "        allocation.branch_tokens = self._branch_tokens(match, request)\n",
            ),
        ),
    ),
    "20a a block that the SSD chunk does not divide is accepted": PutBack(
        "fault_20",
        (
            (
                CONTEXTS + "dynamic_context.py",
                "if config.enable_prefix_caching and config.block_size_tokens % spec.grid:",
                "if False:",
            ),
        ),
    ),
    "20b a foreign host's is passed over in silence": PutBack(
        "fault_20",
        ((CONTEXTS + "mamba_slot_allocator.py", "if self._block_size % settings.grid:", "if False:"),),
    ),
    "21a a resumed state is copied first": PutBack(
        "fault_21_resuming",
        (
            (
                CONTEXTS + "request_states.py",
                "        allocation.num_computed = num_tokens\n",
                "        allocation.num_computed = num_tokens\n        self.move_to_live(allocation)\n",
            ),
        ),
    ),
    "21b a commit copies one state at a time": PutBack(
        "fault_21_a_hosts",
        (
            (
                "inference/kernels/reference/torch_state_copy.py",
                "        destination_pool[:, write] = source_pool[:, read]\n",
                "        for i, j in zip(read, write, strict=True):\n"
                "            destination_pool[:, j] = source_pool[:, i]\n",
            ),
        ),
    ),
    "22 step metadata reads a tensor back": PutBack(
        "fault_22",
        (
            (
                CONTEXTS + "step_builder.py",
                "        return self._tensors[self._turn % len(self._tensors)](shape)\n",
                "        tensors = self._tensors[self._turn % len(self._tensors)](shape)\n"
                '        int(tensors["kv_lengths"][0])\n        return tensors\n',
            ),
        ),
    ),
    "23 eviction scans the KV blocks": PutBack(
        "fault_23",
        (
            (
                POLICIES + "state_slots.py",
                "        protected = self.pins.keys() | protected\n",
                "        protected = self.pins.keys() | protected\n"
                f"        {HOST_KV}.block_hashes.nonzero()\n",
            ),
        ),
    ),
}


def run_fault_tests(test: str, package: Path | None = None) -> int:
    """pytest's exit status for the tests of a fault, on the repository's package or a copy."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    if package is not None:
        environment["PYTHONPATH"] = str(package.parent)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", "-k", test,
        "tests/unit/faults/test_stock_faults.py",
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode


@pytest.mark.long
def test_every_fault_test_passes_on_a_plain_copy(tmp_path: Path) -> None:
    """So that a failure below is the fault's, and not the copying's."""
    package = shutil.copytree(ROOT / "core", tmp_path / "mambaslots")
    assert run_fault_tests("fault", package) == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_putting_the_fault_back_is_noticed(fault: str, tmp_path: Path) -> None:
    package = shutil.copytree(ROOT / "core", tmp_path / "mambaslots")
    for file, right, faulty in FAULTS[fault].replacements:
        source = (package / file).read_text()
        assert right in source, f"{file} has changed: {right!r} is not in it"
        (package / file).write_text(source.replace(right, faulty))
    assert run_fault_tests(FAULTS[fault].test, package) == 1, "the fault went unnoticed (or no test ran)"


def test_every_fault_that_can_exist_here_is_listed() -> None:
    """Quick: runs in `make test`, and checks that each replaced piece is still in the source."""
    numbers = {int(name[:2]) for name in FAULTS}
    assert numbers == set(range(1, 24)) - {15}
    for put_back in FAULTS.values():
        for file, right, _ in put_back.replacements:
            assert right in (ROOT / "core" / file).read_text(), f"{file} has changed: {right!r} is not in it"
