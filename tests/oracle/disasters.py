"""What went wrong where other engines cache recurrent states, and the threads of their trackers.

Tests carry the numbers: `@pytest.mark.disaster(number=1)`. `make docs` writes docs/disasters.md.
"""

DISASTERS = {
    1: (
        "The scheduler published a state's hash before the step that writes the state. A client cancelled a "
        "long prefill and sent the prompt again. The second request resumed from a state that was never "
        "written",
        "vLLM #56525",
    ),
    2: (
        "New requests got freed state blocks with their old contents: the code that zeroes blocks skipped "
        "layers whose cache is a tuple of tensors",
        "vLLM #56524, #35219",
    ),
    3: (
        "The kernel cut the flattened batch into chunks, but its chunk states were indexed as if each "
        "request had chunks of its own. Only the cached states of a batch's first request were right",
        "SGLang #31833, #33450, #37836",
    ),
    4: (
        "The cache stored the state after 192 tokens under the key of the first 96 tokens",
        "SGLang #38815, #39209",
    ),
    5: (
        "With decode context parallelism, the blocks of the prefix tree became longer than the distance "
        "between states. States were stored under keys of prefixes up to 384 tokens shorter than their own",
        "SGLang #34760",
    ),
    6: (
        "The index of a state was computed with chunks of 128 tokens, but there is a state every 64 tokens",
        "SGLang #33515",
    ),
    7: (
        "States inside a prefill were cached in bfloat16, although the pool is float32. Answers after a hit "
        "differed from answers after a miss",
        "SGLang #34820",
    ),
    8: (
        "A prompt ended one token after the cached state. For this single token, the kernel of the experts "
        "chose another tile size and returned NaN",
        "SGLang #29633",
    ),
    9: (
        "Groups of Mamba layers shared metadata. In CUDA graphs, the buffers of the second group were never "
        "updated, and outputs were NaN",
        "vLLM #34874",
    ),
    10: (
        "With speculative decoding, the cache treated states like KV, from which rejected drafts can be "
        "removed. Requests resumed one block off, and text of tool calls appeared in answers",
        "vLLM #43559, #53912, #47861, #48375, #53945",
    ),
    11: (
        "With speculative decoding, prompts of some lengths had no hits, and no message said so",
        "vLLM #52244, #54360",
    ),
    12: (
        "A kernel got the number of a slot or column that does not exist, and made an illegal memory access",
        "vLLM #54173, #50021",
    ),
    13: (
        "A KV connector loaded only the KV of the attention layers, but reported a hit for all layers. The "
        "recurrent layers started from unset memory, and 40 % of the answers were garbled",
        "LMCache #2845, #2863, #4247",
    ),
    14: (
        "A request got a slot before a state was copied into the slot from host memory. The copy was "
        "aborted, and the request read the slot's old contents",
        "SGLang #30986",
    ),
    15: (
        "The CUDA stream that copies to host memory did not wait for the stream that computes. Some requests "
        "resumed from garbage",
        "vLLM #45704",
    ),
    16: (
        "The prefix match copied a state for a request. The request was cancelled before it owned the copy, "
        "so the slot of the copy was never freed",
        "SGLang #12693",
    ),
    17: (
        "Transfers had locked all cached states. The allocator found no slot for a new state, its assertion "
        "failed, and the server ended",
        "SGLang #36770, #40128, #33773",
    ),
    18: (
        "States and KV shared one memory. To make room for a state, the cache evicted only states, although "
        "unused KV filled the memory: the allocation failed",
        "SGLang #34441",
    ),
    19: (
        "After a node of the prefix tree was split, it stayed listed under its old key. A later eviction "
        "failed with an assertion",
        "SGLang #36696, #28692",
    ),
    20: (
        "A block became full and got a new hash. Then the cache registered the hash of the block's partial "
        "content again",
        "vLLM #52972",
    ),
    21: (
        "While a request decoded, the state at the end of its prompt was freed, so later prompts could not "
        "resume from it",
        "vLLM #57253",
    ),
    22: (
        "Some models add tensors to a state, beside the convolution and SSM tensors. When the cache copied a "
        "state, it did not copy these tensors",
        "SGLang #38619, #39862",
    ),
    23: (
        "Two faults: `temperature=0.0` was replaced by 1.0; hits were counted for requests that were not "
        "admitted",
        "Megatron #6417, #6416",
    ),
    24: (
        "After the weights were replaced, requests resumed from states and KV of the old weights, and "
        "routers still knew the old prefixes",
        "Megatron #6852, ms-swift #6343, vLLM #42125",
    ),
}
"""Number -> what happened, and where."""
