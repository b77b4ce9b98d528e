"""What is cached, where, and held by which sequence: numbers and token ids; a host adds the tensors.

A sequence calls `PrefixCache`, whose docstring lists the calls in their order. It works with one index, the
pool of blocks and that of slots. Elsewhere, only a host's slot allocator changes the index (`note_refused`):

    prefix_cache ---- kv_block_allocator, state_slots ---- prefix_tree
      |                     |                |
    paths,             memory, borrowing   eviction, value_eviction, tier
    checkpoint_plan, pins

prefix_cache         the calls of a sequence
paths                a sequence: what of it is cached and why no more, what it holds, what a step stores
checkpoint_plan      which boundaries a step stores; imports no other part
pins                 prefixes that stay until they are unpinned
prefix_tree          the index: registered blocks, the states at their ends, what changed last
free_lists           free blocks, dirty entries, and which leaf of the tree is freed next
kv_block_allocator   KV blocks: reference counts, the free list, eviction; checks the arguments of a host
state_slots          slots: free, reserved, committed, live; pins; which states are evicted or fetched
eviction             the interface of policies, and LRU
value_eviction       the default policy: classes of states, their rates of use, the order by value
state_tree           what that policy knows of prefixes, ghosts included
use_rates            how soon requests come back to a state of each class
memory, borrowing    both pools as units of one memory, whose sides may change
tier                 which states have a copy in host memory or in a file
hashing              chained hashes of blocks, salts, and what is gone under which hash
pool_stats           counts, and why tokens were computed or entries removed
"""
