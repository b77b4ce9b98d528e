"""What `MambaSlotAllocator` reads of the context that holds it."""

from typing import Any

from ...validation import INT32_MAX, integer, refused
from .cache.block_tree import BlockTree
from .cache.kv_block_allocator import KVBlockAllocator


class HostTree(BlockTree):
    """The index of states over a host's own index of KV blocks, which are not registered here."""

    def __init__(self, num_blocks: int, host_kv: Any) -> None:
        super().__init__(num_blocks)
        self.host_kv = host_kv

    def key_of(self, block: int) -> int:
        return int(self.host_kv.block_hashes[block])

    def keys_to(self, block: int) -> list[int]:
        """The hash of the block alone: a host does not say what precedes it."""
        return [self.key_of(block)]


def size_of(context: Any, name: str, default: int = 0, minimum: int = 0) -> int:
    """The size that the host states, or `default`."""
    value = getattr(context, name, None)
    return default if value is None else integer(f"context.{name}", value, minimum, INT32_MAX)


def block_count(context: object) -> int:
    """The number of KV blocks of a host; a ValueError for an object that is no host."""
    kv = getattr(context, "kv_block_allocator", None)
    if kv is None:
        raise refused("context", context, "a host that has a kv_block_allocator")
    name = next((name for name in ("total_count", "pool_size") if hasattr(kv, name)), "")
    if not name or not (isinstance(kv, KVBlockAllocator) or hasattr(kv, "block_hashes")):
        raise refused("context.kv_block_allocator", kv, "what has block_hashes, and total_count or pool_size")
    return integer(f"context.kv_block_allocator.{name}", getattr(kv, name), 0, INT32_MAX)
