"""One step of all running requests: their rows, the memory they hold, and what the model reads.

dynamic_request, admission           a request, and how it gets a row, a live slot and blocks
step_inputs, step_builder            what a model reads, prefills in chunks; the one buffer it crosses in
padding                              the sizes that steps are padded to
request_states, device_memory        where each state is; the tensors of the pools
pool_sizes                           how large the pools are
input_pages                          inputs of decodes by replay
tier_copies, state_files             the bytes of the tiers: pinned host memory, and files
dynamic_context                      all of it: schedule, begin_step, end_step
mamba_slot_allocator                 states for a host: another engine, with a KV cache of its own
host_settings, host_states           what the host states; the index and the tensors of its states
planned_states                       which states a step of the host writes, and where
"""
