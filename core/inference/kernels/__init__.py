"""Kernels that move and compute states. Each takes pools and indices and decides nothing.

A function exists twice with one signature: in Triton for a GPU, in a module of this folder, and in plain
torch for a CPU and as the oracle, in `reference/`. A model calls both by the methods of a `KernelSet`, whose
docstring has all arguments; `kernel_set(device, dtype)` chooses. Engines and contexts choose by the device.
A function writes only what its indices name. An index of -1 is padding: nothing is read or written.

step_rows, mixer_inputs, state_pools         what callers hand over: rows of a step; inputs; states
torch_kernels, gpu_kernels, kernel_set       the functions that a model calls, twice, and the choice
conv, ssd, ssd_stages, delta                 prefill and decode of convolutions, Mamba-2, gated delta nets
conv_replay, ssd_replay, delta_replay,       decodes with the rounding of a prefill
delta_solve                                  new rows of a triangular system for `delta_replay`
attention, attention_segments, write_kv      attention over paged KV, and the store of keys and values
norms, gates                                 the rest of a layer
few_rows                                     matrix products of up to eight rows, in place of cuBLAS's
sampling, penalties, token_draws             tokens and their log-probs; logits lowered; tokens drawn
state_copy, state_move, state_codec          whole states copied and encoded; the launches for both
tiles, dtypes_and_strides, chunk_grid        what several kernels do and accept; the chunks that they compute
reference/torch_*                            conv, ssd, delta, attention, penalties, token_draws, state_copy,
                                             pointwise (norms, gates, the head); chunks
"""
