"""Which request advances in a step, how the step runs, and how an answer reaches its reader.

An engine has a context (rows, memory, the cache) and an `EngineCore`: the requests and their results. The
core has a scheduler, a `StepRunner` and the observers. A call that changes a request or the cache passes
through both classes: the engine checks its arguments and calls a method of the core (`CoreCall`), which runs
inside `EngineCore.changing`; `resume` has nothing to undo. So a failed call is undone in one place, and a
`LeadingEngine` makes the core's calls, and no others, on all ranks. Calls that only read are the engine's.

dynamic_engine, request_factory     the engine's calls; new requests from their arguments, checked here alone
engine_core                         the calls that change an engine; undo of one that failed
engine_description                  what serves the model, as an operator reads it
scheduler, drafter                  which requests advance; guesses at their next tokens
step_runner                         the model's call in a step; tokens are drawn, and read later
logits_changes                      penalties, biases
cuda_graphs                         a model's steps as CUDA graphs
streams, async_engine, engine_thread
                                    an answer as its reader sees it; an engine in a thread of its own
invariance/                         batch invariance: the bits of an answer depend on its request alone
engine_observer                     what a step did, for those who watch
"""
