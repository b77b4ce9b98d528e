"""One step of all running requests: their rows, the memory they hold, and what the model reads.

Made of `cache`, which decides by numbers alone, and `kernels`, which move tensors; knows no engine.

dynamic_request                 a request, what it holds and computes; its tokens as a drafter reads them
admission                       how a request gets a row, a live slot and blocks
step_inputs, step_builder       a model, what it reads; the one buffer in which it crosses to the device
padding                         the sizes that steps are padded to
request_states, device_memory   the pool of states, and where each request's is; the tensors of all pools
pool_sizes                      how large the pools are
input_blocks                    inputs of decodes by replay, and the KV blocks that hold them
tier_copies, state_files        the bytes of the tiers: pinned host memory, and files
row_checksum                    checksums of the copies, and of pieces that replicas send
dynamic_context                 all of it: schedule, begin_step, end_step
mamba_slot_allocator, hosts/    states for a host: another engine, with a KV cache of its own
"""
