"""The functions of `KernelSet` in plain torch: what a CPU runs, and the oracle of the GPU's kernels.

Every function runs on any device and in any float dtype, and computes in `compute_dtype`, float32 or wider.
Pools are those of one layer, `[slots, ...]`. A kernel reads every source before it writes any destination, so
that a row may be updated in place.

Inputs may be padded to larger shapes. Padding writes nothing:

    row             has no token, or in decode kernels one; source and destination are -1
    token           lies after the real tokens; row is -1; its output is unspecified
    chunk           lies after the chunks that `row_chunk_starts` counts; is empty
    checkpoint      row is -1, end is 0, destination is -1
    position of KV  is -1
"""
