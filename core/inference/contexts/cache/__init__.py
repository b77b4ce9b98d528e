"""What is cached, where, and held by which sequence. Everything here is an integer; a host adds the tensors.

prefix_cache, prefix_match           the calls of a sequence, in their order; what is found, and why not more
pins                                 prefixes that stay until they are unpinned
prefix_tree, removal                 the index: blocks and states; which leaf goes first, and what is gone
kv_block_allocator, state_slots      who owns a block or a slot, the free lists, who is evicted next
memory, borrowing                    both pools as units of one memory, whose sides may change
checkpoint_plan                      which boundaries a step stores, what a sequence holds, slots reserved
eviction, value_eviction, use_rates  policies: the interface with LRU, and the default one with its scores
tier                                 copies of states in host memory and in files
hashing, pool_stats                  chained hashes with their salt; counts

May import the standard library, numpy and the package's errors and checks; no torch, request or step.
"""
