"""Which request advances in a step, how the step runs, and how an answer reaches its reader.

An engine has a context (rows, memory, the cache) and an `EngineCore`: the requests and their results. The
core has a scheduler, a `StepRunner` and the observers. Whatever changes a request or the cache is a method
of the core, and runs inside `EngineCore.changing`.

dynamic_engine, arguments           the engine's calls; new requests from their arguments, checked here alone
engine_core                         the calls that change an engine; undo of one that failed
scheduler, drafter                  which requests advance; guesses at their next tokens
steps, logits_changes               the model's call, and tokens drawn; penalties, biases, min_p
runner, dummy_steps                 the protocol of a model, and its CUDA graphs; steps without users
streams, async_engine, engine_thread
                                    an answer as its reader sees it; an engine in a thread of its own
batch_invariance, product_check     the promise of bits: the mode, and its check at an engine's start
engine_observer                     what a step did, for those who watch

May import `contexts`, `cache` and `kernels`; a model through the protocol in `runner`; no server, no network.
"""
