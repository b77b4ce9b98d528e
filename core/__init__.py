"""mambaslots: the prefix cache for hybrid language models.

A name is imported at its first use: `import mambaslots` and the cache alone need no torch.

llm, loaded_model            a model with its text, and an engine of a size for this machine
engine_sizes, progress       the sizes that are not given; bars of what takes long
config, named_policies       settings of an engine; eviction policies and plans as text
params_and_results           what a request asks for and returns
cache_stats                  what became of prompt tokens, and how full the pools are
state_spec, model_parts      what a model keeps of a sequence; which part of it a rank holds
parallel_groups              the process groups of a split model
devices                      the current device, and numbers that the host sends to one
files, errors, validation    a model's files; errors of capacity and of an engine; argument checks
version                      this version, and the newest tested ones of others
__main__                     `python -m mambaslots`: the command of `cli`
lazy_names                   public names that are imported at their first use

docs/architecture.md says what each package may import.
"""

from typing import TYPE_CHECKING

from .lazy_names import importer
from .version import VERSION

if TYPE_CHECKING:
    from . import hf as hf
    from . import models, testing, text
    from .cache_stats import EngineStats, SpeculationStats
    from .config import InferenceConfig
    from .errors import EngineDeadError, KVBlockCapacityError, MambaSlotCapacityError, QueueFullError
    from .inference.contexts.cache.checkpoint_plan import CheckpointPlan
    from .inference.contexts.cache.eviction import EvictionPolicy
    from .inference.contexts.cache.hashing import PrefixHashChain
    from .inference.contexts.cache.kv_block_allocator import KVBlockAllocator
    from .inference.contexts.cache.paths import PathStep
    from .inference.contexts.cache.pool_stats import COMPUTE_REASONS
    from .inference.contexts.cache.prefix_cache import PrefixCache
    from .inference.contexts.mamba_slot_allocator import MambaSlotAllocator
    from .inference.contexts.step_inputs import Model, StepInputs
    from .inference.engines.async_engine import AsyncEngine
    from .inference.engines.drafter import Drafter, NgramDrafter
    from .inference.engines.dynamic_engine import DynamicInferenceEngine
    from .inference.engines.engine_observer import EngineObserver, StepReport
    from .inference.engines.streams import TokenStream
    from .inference.kernels.kernel_set import kernel_set
    from .inference.kernels.step_rows import AttentionRows
    from .llm import LLM, Completion
    from .loaded_model import LoadedModel, load
    from .parallel_groups import ParallelGroups
    from .params_and_results import RequestResult, SamplingParams
    from .state_spec import (
        HybridStateSpec,
        StateTensor,
        gated_delta_net_states,
        mamba2_states,
        short_conv_states,
    )
    from .text import TextCodec

__version__ = VERSION

__all__ = [
    # serving
    "LLM", "Completion", "DynamicInferenceEngine", "AsyncEngine", "InferenceConfig", "SamplingParams",
    "CheckpointPlan", "RequestResult", "TokenStream", "StepReport", "EngineObserver", "Drafter",
    "NgramDrafter", "EngineStats", "SpeculationStats", "COMPUTE_REASONS", "load", "LoadedModel", "TextCodec",
    "text",
    # the cache, in an engine of your own
    "PrefixCache", "PathStep", "PrefixHashChain", "EvictionPolicy", "KVBlockAllocator", "MambaSlotAllocator",
    # bringing a model
    "Model", "HybridStateSpec", "StateTensor", "mamba2_states", "gated_delta_net_states", "short_conv_states",
    "StepInputs", "kernel_set", "AttentionRows", "ParallelGroups", "models", "testing",
    # errors
    "KVBlockCapacityError", "MambaSlotCapacityError", "QueueFullError",
    "EngineDeadError",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = importer(globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
