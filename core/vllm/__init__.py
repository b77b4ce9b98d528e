"""The parts of vLLM's scheme for recurrent states, for a host that has vLLM's model runner or one like it.

In vLLM's *align* mode a request has a row of a slot table, with one column for each block of its sequence.
States of draft tokens go to the columns behind the running column, and states on block boundaries stay
where a prefix cache finds them. The accepted counts stay on the device.

At start a host makes a `MambaCacheConfig`, and `MambaBuffers.create(...)` from it. In every step it calls,
under vLLM's names:

1. `cleanup_mamba_state_idx`             forget requests that finished, were preempted, or run again
2. `preprocess_mamba`                    move each request's state to the column that this step updates
3. `Mamba2AttentionMetadataBuilder.build`   cut the prefills into SSD chunks
4. the model's forward
5. `stage_postprocess_inputs_to_gpu`     send token counts and columns; any time between 2 and 6
6. `postprocess_mamba_align_gpu`         after sampling: put states on boundaries into their columns

Steps 5 and 6 are for steps with drafts. Cache mode "all" calls `postprocess_mamba_all` instead. A host
whose rows and columns live on the device calls `MambaSpecDecodeGPUContext.run_fused_precopy` and
`run_fused_postprocess_align` itself. `AlignRows` keeps the same books for a host that knows the accepted
counts on the CPU.

`import mambaslots.vllm` imports no triton: the kernels are imported when buffers are made for a CUDA device.
"""

from .align_buffers import (
    Buffer,
    MakeBuffer,
    MambaBuffers,
    MambaPreprocessBuffers,
    MambaSpecDecodeGPUContext,
    StagedBuffer,
)
from .align_host import (
    cleanup_mamba_state_idx,
    postprocess_mamba_align_gpu,
    postprocess_mamba_all,
    preprocess_mamba,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
    stage_postprocess_metadata_to_gpu,
)
from .align_rows import NO_SLOT, AlignRows, Copies, ForwardIndices
from .align_rule import FRESH, PADDING, Advance, BoundarySave, start_columns
from .chunk_metadata import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
    build_chunk_metadata,
    compute_varlen_chunk_metadata,
)
from .state_binding import MambaCacheConfig

__all__ = [
    # set-up of align mode
    "MambaCacheConfig", "MambaBuffers", "MambaPreprocessBuffers", "MambaSpecDecodeGPUContext",
    "Buffer", "MakeBuffer", "StagedBuffer",
    # a step in align mode
    "cleanup_mamba_state_idx", "preprocess_mamba", "stage_postprocess_inputs_to_gpu",
    "stage_mamba_state_idx_to_gpu", "stage_postprocess_metadata_to_gpu", "postprocess_mamba_align_gpu",
    "postprocess_mamba_all",
    # SSD chunks
    "Mamba2AttentionBackend", "Mamba2AttentionMetadata", "Mamba2AttentionMetadataBuilder",
    "build_chunk_metadata", "compute_varlen_chunk_metadata",
    # the same books on the CPU, by rows
    "AlignRows", "Advance", "BoundarySave", "Copies", "ForwardIndices", "start_columns",
    "FRESH", "PADDING", "NO_SLOT",
]  # fmt: skip
