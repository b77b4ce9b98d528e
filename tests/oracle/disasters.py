"""What went wrong where other engines cache recurrent states: a sentence, and the threads of their trackers.

Tests carry the numbers: `@pytest.mark.disaster(number=1)`. `make docs` writes docs/disasters.md.
"""

DISASTERS = {
    1: (
        "A state's hash was published when its step was scheduled. The client cancelled a long prefill "
        "and sent it again: a hit on a state that was never written",
        "vLLM #56525",
    ),
    2: (
        "Blocks of states were given out again without being zeroed, because a tuple of tensors escaped",
        "vLLM #56524, #35219",
    ),
    3: (
        "Chunk states were indexed by request, and the kernel's chunks ran over the flattened batch: "
        "wrong states for all but the first prefill",
        "SGLang #31833, #33450, #37836",
    ),
    4: (
        "A key was shortened to 96 tokens, and the state after 192 attached to it",
        "SGLang #38815, #39209",
    ),
    5: (
        "Pages grew and the grid of states did not: states up to 384 tokens ahead of their keys",
        "SGLang #34760",
    ),
    6: (
        "Chunks of 128 tokens indexed states of 64",
        "SGLang #33515",
    ),
    7: (
        "Checkpoints were stored in bfloat16 though the pool is float32: a hit was not a miss",
        "SGLang #34820",
    ),
    8: (
        "A prompt ended one token behind a hit; the single token took another tile of the experts: NaN",
        "SGLang #29633",
    ),
    9: (
        "Cache groups shared metadata, and the second group's buffers of a CUDA graph were never "
        "updated: NaN",
        "vLLM #34874",
    ),
    10: (
        "A rewind of drafts was applied to states, and hits lay one block off: calls of tools leaked",
        "vLLM #43559, #53912, #47861, #48375, #53945",
    ),
    11: (
        "With drafts, prompts of some lengths had no hits, silently",
        "vLLM #52244, #54360",
    ),
    12: (
        "A kernel was given a column, or a slot, that does not exist: an illegal access",
        "vLLM #54173, #50021",
    ),
    13: (
        "A connector brought attention's KV and reported a hit for all layers; recurrent layers began "
        "from noise (40 % garbled)",
        "LMCache #2845, #2863, #4247",
    ),
    14: (
        "Load-back aborted: the slot was published before its copy ran",
        "SGLang #30986",
    ),
    15: (
        "Offload without an order between streams: now and then garbage",
        "vLLM #45704",
    ),
    16: (
        "Abort between match and allocation lost the forked slot",
        "SGLang #12693",
    ),
    17: (
        "All cached states locked by transfers: allocator asserts, server dies",
        "SGLang #36770, #40128, #33773",
    ),
    18: (
        "Pool split in two, one side starves while the other is idle",
        "SGLang #34441",
    ),
    19: (
        "Tree node under a stale child key; eviction asserts later",
        "SGLang #36696, #28692",
    ),
    20: (
        "Hash of a partial block came back after its promotion",
        "vLLM #52972",
    ),
    21: (
        "Boundary state of a running request retired while the cache names it",
        "vLLM #57253",
    ),
    22: (
        "Side states orphaned, or left out of copies",
        "SGLang #38619, #39862",
    ),
    23: (
        "`temperature=0.0` became 1.0; hits counted for refused admissions",
        "Megatron #6417, #6416",
    ),
    24: (
        "Prefix cache of old weights after refit, also in the router",
        "Megatron #6852, ms-swift #6343, vLLM #42125",
    ),
}
"""Number -> what happened, and where."""
