"""How wide the classes of this room are, and the names that hosts of the slot allocator rely on."""

import ast
from pathlib import Path

import mambaslots as ms

CONTEXTS = Path(ms.__file__).parent / "inference" / "contexts"
WIDEST = 25

HOST_CONTRACT = {
    "MambaSlotAllocator": {
        # as megatron-core names them
        "allocate_slots_batch", "block_to_slot", "commit_intermediate_states", "compute_and_store_offsets",
        "context", "conv_states", "free_count", "get_intermediate_cpu_data", "get_slot", "has_state",
        "hash_to_block_id", "intermediate_conv_out", "intermediate_ssm_out", "invalidate_block",
        "max_intermediate_count", "max_slots", "num_mamba_layers", "on_kv_blocks_deregistered",
        "register_block_hashes_batch", "reset", "restore_to_live", "slot_to_block", "ssm_states",
        "store_from_live_batch", "store_from_tensors",
        # reservations, pins and use
        "commit", "record_use", "pin", "release_reservation", "reserve", "unpin",
        # checks
        "check_integrity",
        # its pool, and what it could not plan
        "slots", "num_dropped",
    },
}  # fmt: skip


def public_names(node: ast.ClassDef) -> set[str]:
    """Methods, properties, and attributes that the class gives itself."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        stores = isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if stores and ast.unparse(item.value) == "self":
            names.add(item.attr)
    return {name for name in names if not name.startswith("_")}


def classes() -> dict[str, set[str]]:
    trees = [ast.parse(path.read_text()) for path in sorted(CONTEXTS.glob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: public_names(node) for node in nodes}


def test_the_slot_allocator_has_the_names_of_the_host_contract_and_no_others() -> None:
    found = classes()
    assert {name: found[name] for name in HOST_CONTRACT} == HOST_CONTRACT


def test_no_class_is_wide_but_the_one_that_hosts_plug_in() -> None:
    wide = {name: len(names) for name, names in classes().items() if len(names) > WIDEST}
    assert wide.keys() == HOST_CONTRACT.keys()
