"""What is cached, where, and held by which sequence: numbers and token ids. Imports no torch and no kernel.

A sequence calls `PrefixCache`, whose docstring lists the calls in their order. It works with two indexes, of
blocks and of states, and with the pool of each:

    prefix_cache ------- kv_block_allocator -------- block_tree
      |                     |                            |
    pins                 unit_borrower, memory           |
      |                     |                            |
    paths -------------- state_slots --------------- cached_states ---- eviction, value_eviction

prefix_cache         the calls of a sequence
paths                a sequence: what it holds, what its next step computes, which slots it reserves
checkpoint_plan      which boundaries a step stores; imports no other part
pins                 prefixes that stay until they are unpinned
block_tree           the index of blocks: who holds and who continues them, which go next, which are gone
cached_states        the index of states: slots, hashes, uses; the match of a sequence, and its reasons
kv_block_allocator   KV blocks: the free list, eviction; checks the arguments of a host
state_slots          slots: free, reserved, committed, live; pins; which states are evicted or fetched
eviction             the interface of policies, and LRU
value_eviction       the default policy: classes of states, their rates of use, the order by value
state_tree           what that policy knows of prefixes, ghosts included
use_rates            how soon requests come back to a state of each class
memory, unit_borrower
                     both pools as units of one memory; what moves units between them
free_entries         the free list in a memory of units; which free entries are not zero yet
state_tiers          which states have a copy in host memory or in a file
hashing              chained hashes of blocks, and salts
pool_stats           counts, and why tokens were computed or entries removed
"""
