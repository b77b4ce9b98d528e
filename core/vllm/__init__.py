"""vLLM's scheme for recurrent states, for a host with the model runner of vLLM 0.25.0 or one like it.

In *align* mode a request has a row of a slot table, with one column for each block of its sequence. States of
drafts go to the columns after the running column, and states on block boundaries stay where a prefix cache
finds them. A host makes a `MambaCacheConfig` and `MambaBuffers` at start, and calls in every step:

1. `cleanup_mamba_state_idx`           drop requests that finished, were preempted, or resumed
2. `preprocess_mamba`                  move each request's state to the column that this step updates
3. the model's forward, whose prefills are cut into SSD chunks by `build_chunk_metadata`
4. `stage_postprocess_inputs_to_gpu`   send token counts and columns; any time between 2 and 5
5. `postprocess_mamba_align_gpu`       after sampling: copy states on boundaries into their columns

Steps 4 and 5 are for steps with drafts. `advance` is the rule behind step 2, for a host whose forward reads
the old column and writes the new one (copy-free). Triton is imported when buffers are made for a CUDA device.

align_host                       steps 1, 2, 4 and 5 under vLLM's names
align_rule                       which column holds which state: the rule
align_kernels, align_reference   the copies of states, in Triton and in plain torch
chunk_metadata                   SSD chunks on the grid that serves a prefix cache
"""

from .align_host import (
    MambaBuffers,
    MambaCacheConfig,
    cleanup_mamba_state_idx,
    postprocess_mamba_align_gpu,
    preprocess_mamba,
    stage_postprocess_inputs_to_gpu,
)
from .align_rule import advance
from .chunk_metadata import build_chunk_metadata

__all__ = [
    "MambaBuffers", "MambaCacheConfig", "advance", "build_chunk_metadata", "cleanup_mamba_state_idx",
    "postprocess_mamba_align_gpu", "preprocess_mamba", "stage_postprocess_inputs_to_gpu",
]  # fmt: skip
