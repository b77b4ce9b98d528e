"""One step of all running requests: their rows, the memory they hold, and what the model reads.

request, token_ledger, admission     a request, its counts, and how it gets a row, a live slot and blocks
step_inputs, chunk_grid              what a model reads, prefills in chunks
step_builder, step_buffer, padding   how it is built and sent to the device; the sizes of steps
states, state_pool                   where each state is, and the pool that it is in
device_memory, pool_sizes            the tensors of the pools, and how large they are
input_pages                          inputs of decodes by replay
tier_copies, state_files             the bytes of the tiers: pinned host memory, and files
dynamic_context                      all of it: schedule, begin_step, end_step
mamba_slot_allocator                 states for a host: another engine, with a KV cache of its own
host_settings, host_states           what the host states; the index and the tensors of its states
planned_states                       which states a step of the host writes, and where
"""
