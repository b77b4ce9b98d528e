"""mambaslots: the prefix cache for hybrid language models."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import models, text
from .cache_stats import COMPUTE_REASONS, CacheStats, ComputeReason, EngineStats, SpeculationStats
from .config import InferenceConfig
from .errors import (
    EngineDeadError,
    KVBlockCapacityError,
    MambaSlotCapacityError,
    QueueFullError,
    RequestOverflowError,
)
from .inference.contexts.cache.cached_path import CachedPath
from .inference.contexts.cache.checkpoint_plan import CheckpointPlan
from .inference.contexts.cache.kv_block_allocator import KVBlockAllocator
from .inference.contexts.cache.pinned_prefixes import PinnedPrefix
from .inference.contexts.cache.prefix_cache import PrefixCache
from .inference.contexts.cache.prefix_hash import PrefixHashChain
from .inference.contexts.cache.prefix_match import PrefixMatch
from .inference.contexts.dynamic_context import DynamicInferenceContext
from .inference.contexts.mamba_metadata import MambaMetadata
from .inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .inference.contexts.request import DynamicInferenceRequest, GeneratedToken
from .inference.contexts.request_step import RequestStep
from .inference.contexts.state_pool import StatePool
from .inference.contexts.step import Step, StepObserver
from .inference.contexts.step_inputs import Checkpoints, PrefillChunks, Replay, StepInputs, StepShape
from .inference.engines.async_engine import AsyncEngine
from .inference.engines.async_stream import AsyncStream
from .inference.engines.drafter import Drafter, NgramDrafter
from .inference.engines.dynamic_engine import DynamicInferenceEngine
from .inference.engines.engine_observer import EngineObserver
from .inference.engines.model import Model
from .inference.engines.step_report import StepReport
from .inference.engines.token_stream import TokenStream
from .inference.kernels.attention_rows import AttentionRows
from .inference.kernels.kernel_set import KernelSet, kernel_set
from .input_tensor import InputTensor
from .loaded_model import LoadedModel, load
from .model_shard import ModelShard
from .parallel_groups import ParallelGroups
from .request import FinishReason, RequestResult, ScoreResult
from .sampling_params import SamplingParams
from .state_kinds import gated_delta_net_states, mamba2_states, short_conv_states
from .state_spec import HybridStateSpec
from .state_tensor import StateSegment, StateSplit, StateTensor
from .text import TextCodec
from .version import VERSION

if TYPE_CHECKING:
    from . import hf as hf
    from . import testing

__version__ = VERSION

__all__ = [
    # serving
    "DynamicInferenceEngine", "InferenceConfig", "SamplingParams", "CheckpointPlan",
    "RequestResult", "ScoreResult", "FinishReason", "GeneratedToken", "TokenStream", "StepReport",
    "AsyncEngine", "AsyncStream", "EngineObserver",
    "PinnedPrefix",
    "CacheStats", "EngineStats", "SpeculationStats", "ComputeReason", "COMPUTE_REASONS",
    "Drafter", "NgramDrafter",
    "load", "LoadedModel", "TextCodec", "text",
    # the parts
    "DynamicInferenceContext", "DynamicInferenceRequest", "RequestStep", "Step", "StepObserver",
    "PrefixCache", "PrefixMatch", "PrefixHashChain", "CachedPath", "KVBlockAllocator", "MambaSlotAllocator",
    "MambaMetadata", "StatePool",
    # bringing a model
    "Model", "HybridStateSpec", "StateTensor", "StateSplit", "StateSegment", "InputTensor", "mamba2_states",
    "gated_delta_net_states", "short_conv_states",
    "StepInputs", "StepShape", "PrefillChunks", "Checkpoints", "Replay", "kernel_set", "KernelSet",
    "AttentionRows",
    "ModelShard", "ParallelGroups", "models", "testing",
    # errors
    "KVBlockCapacityError", "MambaSlotCapacityError", "RequestOverflowError",
    "QueueFullError", "EngineDeadError",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take any name for a module

    def __getattr__(name: str) -> ModuleType:
        """`testing` and `hf` are imported when they are first asked for: few servers need them."""
        if name in ("testing", "hf"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
