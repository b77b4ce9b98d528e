"""Cached prefixes, KV blocks and states together, on their way between engines, files and replicas.

    engine -- export_prefixes --> PrefixShard -- encode_prefixes --> bytes
    engine <- import_prefixes --- PrefixShard <- decode_prefixes --- bytes
    engine <- import_prefixes -------------------------------------- bytes
    engine -- save_prefixes ----> directory --- load_prefixes ---> engine
    engine -- send_prefixes ----> two-party groups --- receive_prefixes ---> engine

Each rank of a split model exports and imports its own part. The two sides may be split differently, by tensor
and by pipeline ranks: parts are cut and joined by layers, and by heads, groups or channels. A damaged export,
or one of another model, is refused on all ranks of a replica, and nothing changes.

    hand_over -> rendezvous -> link        between two replicas
    files -> manifest                      to and from a directory
    import_ -> placement                   into the pools, on all ranks or on none
    export                                 out of the pools
    codec -> shard -> forest -> format     the export itself
    cache_access, pool_rows                an engine's prefix cache; copies of pool rows
    parts                                  which part of each tensor a rank holds
"""
