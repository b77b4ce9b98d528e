"""An index of KV blocks for tests of state slots alone."""

from mambaslots.inference.contexts.cache.prefix_tree import PrefixTree


def host_tree(offset: int = 1) -> PrefixTree:
    """The tree of a host whose KV blocks have their number and `offset` as hash."""
    return PrefixTree(4096, lambda block: block + offset)
