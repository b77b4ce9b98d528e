"""What this machine lacks of what megatron-core's inference asks for, and its replacement for a while."""

import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from . import fla_stand_ins, stand_ins
from .cuda_on_cpu import kernels_on_cpu, replaced

with warnings.catch_warnings():  # of optional packages that are not here
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.models.gpt import experimental_attention_variant_module_specs  # noqa: F401 - fla warns
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm


@contextmanager
def on_this_machine() -> Iterator[None]:
    """Within it, megatron-core can build and serve a hybrid model; see the package.

    Under torchrun the ranks share the model's heads (tensor parallelism); else it is served in one process.
    """
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(kernels_on_cpu())
            stack.enter_context(_random_numbers_on_cpu())
            # The writer of KV insists on CUDA tensors; without it the context uses torch. Padding that suits
            # a GPU only costs time here.
            context = dynamic_context.DynamicInferenceContext
            stack.enter_context(replaced(
                (dynamic_context, {"triton_append_key_value_cache": None}),
                (context, {"TOKEN_ROUNDER": 4}),
            ))  # fmt: skip
            # Interpreted kernels compute with numpy, also what they then mask away.
            stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        stack.enter_context(_missing_packages())
        if not distributed.is_initialized():
            stack.enter_context(
                _ranks_of_torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else _one_process()
            )
        yield


def what_runs() -> dict[str, str]:
    """What serves the names that megatron-core imports from packages that this machine may lack."""
    torch_or = "plain torch (examples/mcore_rig/stand_ins.py)"
    fa3 = _flash_attention_3()
    return {
        "attention, 16 bit": f"FlashAttention-3, from {fa3}" if fa3 else _own_or("flash_attn", torch_or),
        "attention, 32 bit": _own_or("flash_attn", torch_or),
        "causal_conv1d": _own_or("causal_conv1d", f"last inputs of a sequence: {torch_or}"),
        "mamba_ssm": _own_or("mamba_ssm", f"gated norm: {torch_or}"),
        "transformer_engine": _own_or("transformer_engine", "megatron-core's linear layers, torch's norms"),
        "convolution, scan, decode": "megatron-core's kernels in Triton (megatron/core/ssm/ops)",
        "gated delta net": "fla" if torch.cuda.is_available() else torch_or.replace("stand", "fla_stand"),
    }


def _own_or(package: str, stand_in: str) -> str:
    return stand_in if find_spec(package) is None else f"the package {package}"


def _flash_attention_3() -> str | None:
    """The module with FlashAttention-3's interface, by the name that a package here gives it."""
    if not torch.cuda.is_available():
        return None
    for name in ("flash_attn_3.flash_attn_interface", "flash_attn_interface"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    return None


@contextmanager
def _random_numbers_on_cpu() -> Iterator[None]:
    """One generator instead of megatron-core's, which are CUDA's."""

    @contextmanager
    def fork(tracker: object, name: str = "") -> Iterator[None]:
        yield

    with replaced((random.CudaRNGStatesTracker, {"fork": fork})):
        yield


@contextmanager
def _missing_packages() -> Iterator[None]:
    """Their names in the modules of megatron-core that have already tried to import them."""

    def new_enough(version: str, check_equality: bool = True) -> bool:
        return True

    with ExitStack() as stack:

        def replace(owner: object, **names: object) -> None:
            stack.enter_context(replaced((owner, names)))

        if not getattr(attention, "HAVE_FA3", False) and (name := _flash_attention_3()):
            fa3 = importlib.import_module(name)
            replace(
                attention,
                HAVE_FA3=True,
                _flash_attn_forward=fa3._flash_attn_forward,
                flash_attn3_with_kvcache=fa3.flash_attn_with_kvcache,
            )
        if find_spec("flash_attn") is None:
            replace(
                attention,
                flash_attn_varlen_func=stand_ins.flash_attn_varlen_func,
                flash_attn_with_kvcache=stand_ins.flash_attn_with_kvcache,
                is_fa_min_version=new_enough,
            )
        if find_spec("causal_conv1d") is None:
            replace(
                mamba_mixer,
                causal_conv1d_varlen_states=stand_ins.causal_conv1d_varlen_states,
                is_causal_conv1d_min_version=new_enough,
            )
        if find_spec("mamba_ssm") is None:
            replace(
                mamba_mixer,
                HAVE_MAMBA_SSM=True,
                ExtendedRMSNorm=stand_ins.GatedRMSNorm,
                is_mamba_min_version=new_enough,
            )
        if not torch.cuda.is_available() and find_spec("megatron.core.ssm.ssm_inference") is not None:
            gated_delta_net = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
            replace(
                gated_delta_net,
                chunk_gated_delta_rule=fla_stand_ins.chunk_gated_delta_rule,
                fused_recurrent_gated_delta_rule=fla_stand_ins.fused_recurrent_gated_delta_rule,
                causal_conv1d=fla_stand_ins.causal_conv1d,
                causal_conv1d_update=fla_stand_ins.causal_conv1d_update,
            )
            replace(importlib.import_module("megatron.core.ssm.gated_delta_net.common"), HAVE_FLA=True)
        if find_spec("transformer_engine") is None:
            replace(hybrid_block, TENorm=WrappedTorchNorm)
        yield


@contextmanager
def _one_process() -> Iterator[None]:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(str(Path(folder) / "store"), 1)
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


@contextmanager
def _ranks_of_torchrun() -> Iterator[None]:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=distributed.get_world_size())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
