"""Kernels that move and compute states. Each takes pools and indices and decides nothing.

A function exists twice with one signature: in Triton for a GPU, and in plain torch (`reference`) for a CPU
and as the oracle. An index of -1 is padding: nothing is read, nothing is written.

kernel_set, gpu_kernels, reference   the functions that a model calls, chosen by device
conv, ssd, ssd_stages, delta         prefill and decode of convolutions, Mamba-2 and gated delta nets
conv_replay, ssd_replay, delta_replay
                                     decodes with the rounding of a prefill
attention, attention_segments, write_kv
                                     attention over paged KV, and the store of keys and values
norms, gates, products               the rest of a layer
state_move, state_copy, state_codec, state_tensors, row_checksum
                                     whole states: copied, encoded, checked
penalties, token_draws               logits lowered by counts of tokens; tokens drawn from logits
tiles, state_codec_gpu, penalties_gpu, token_draws_gpu
                                     what programs share; the launches of the codec, the penalties, the draws

May import torch and Triton, and declarations of states; no cache and no request.
"""
