"""megatron-core's own dynamic inference with a hybrid model, also where there is no GPU and few packages.

    import mcore_rig                                   # before anything imports triton

    with mcore_rig.on_this_machine():
        model = mcore_rig.hybrid_model()               # "M*-": Mamba, attention, MLP; random weights
        engine = mcore_rig.make_engine(model, num_mamba_slots=16)  # a DynamicInferenceEngine
        (first,), (again,) = (mcore_rig.serve(engine, [prompt], new_tokens=4) for _ in range(2))
        assert again.tokens == first.tokens  # also .log_probs, .num_resumed_tokens

`on_this_machine` replaces only what the machine lacks. Without a GPU: the `torch.cuda` entry points that
megatron-core touches, and Triton interprets its kernels. Without flash_attn, mamba_ssm, causal_conv1d or
transformer-engine: the few functions and the layer specification that they would give; `what_runs()` says
which. FlashAttention-3 is used by whichever name it has here. On leaving all of it is undone. With pipeline
parallelism, once `parallel_state` knows of it, a process has its stage of the model; under torchrun it has
its heads. `SHAPES["8b"]` is as large as Nemotron-H-8B.

Context, engine, controller, mixer and kernels are megatron-core's own, unmodified, of whichever version is
installed (0.19, 0.20). Nothing here knows of mambaslots.
"""

import os

import torch

os.environ.setdefault("TQDM_DISABLE", "1")  # bars while megatron-core captures graphs
if not torch.cuda.is_available():  # read when triton, and megatron-core's kernels, are imported
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["MAMBA_DETERMINISTIC"] = "1"  # one autotuning configuration: nothing is timed
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling functions takes a minute, and saves no time here

from .cuda_on_cpu import cpu_as_gpu
from .machine import on_this_machine, what_runs
from .megatron_engine import (
    BLOCK,
    SSD_CHUNK,
    VOCABULARY,
    HybridModel,
    Served,
    add,
    finish,
    free_blocks,
    hybrid_model,
    load_stage,
    make_engine,
    num_blocks,
    serve,
    step,
    use_cuda_graphs,
)
from .shapes import SHAPES, TINY, Shape

__all__ = [
    "on_this_machine", "what_runs", "hybrid_model", "load_stage", "make_engine", "serve", "add", "step",
    "finish", "Served", "HybridModel", "Shape", "SHAPES", "TINY", "BLOCK", "SSD_CHUNK", "VOCABULARY",
    "cpu_as_gpu", "use_cuda_graphs", "num_blocks", "free_blocks",
]  # fmt: skip
