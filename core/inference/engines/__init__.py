"""Which request advances in a step, how the step runs, and how an answer reaches its reader.

dynamic_engine, arguments            the engine's calls, with their arguments checked here only
engine_state                         the calls that change an engine; undo of a step that failed
scheduler, sampling, drafter         which requests advance; their next tokens; guesses at more
logits_changes                       penalties, biases, min_p: what requests change before a token is drawn
runner, dummy_steps                  a step as launches or as one CUDA graph; steps without users
async_engine, streams                an engine in a thread of its own; one stream type for all readers
batch_invariance, product_check      the promise of bits: the mode, and its check at an engine's start
engine_observer, memory_poison       what a step did, for those who watch; NaN in free memory

May import `contexts`, `cache` and `kernels`; a model through the protocol in `runner`; no server, no network.
"""
