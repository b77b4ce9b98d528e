"""What is cached, where, and held by which sequence. Everything here is an integer; a host adds the tensors.

prefix_cache, prefix_match           the calls of a sequence, in their order; what is found, and why not more
pins                                 prefixes that stay until they are unpinned
prefix_tree, leaf_order              the index: blocks, states at their ends, ghosts; which leaf goes first
kv_block_allocator, state_slots      who owns a block or a slot, the free lists, who is evicted next
memory, borrowing                    both pools as units of one memory, whose sides may change
checkpoint_plan, checkpoints         which boundaries a step stores, and the slots reserved for them
eviction, value_eviction, use_rates  policies: the interface with LRU, and the default one with its scores
tier                                 copies of states in host memory and in files
hashing, reasons, pool_stats         chained hashes with their salt; why tokens are computed; counts

May import the standard library, numpy and the package's errors and checks; no torch, request or step.
"""
