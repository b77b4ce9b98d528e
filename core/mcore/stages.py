"""Corrections for pipeline stages: all stages skip, evict and admit alike, or all of them refuse."""

import copy
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..parallel_groups import ParallelGroups
from .overrides import override
from .versions import DYNAMIC_CONTEXT, STATE_CONFIG

_RECURRENT = "MG"  # megatron-core's layer letters; D is sparse attention
_ATTENTION = frozenset("*D")


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage sends its peers before it builds its context."""

    state_config: Any  # its MambaInferenceStateConfig, which only lists the layers where none is Mamba's
    state_budget_gb: float
    live_states: int | None  # of requests that run, as far as the memory share goes; None: no limit

    @classmethod
    def of(cls, config: Any) -> "Stage":
        """The stage with this InferenceConfig."""
        state_config = config.mamba_inference_state_config
        return cls(state_config, config.prefix_caching_mamba_gb or 0, _live_states(config, state_config))

    @property
    def has_mamba(self) -> bool:
        config = self.state_config
        return bool(config and config.conv_states_shape and _recurrent_layers(config))


def _recurrent_layers(state_config: Any) -> int:
    """How many layers have a state: Mamba's, or gated delta nets."""
    return sum(layer in _RECURRENT for layer in state_config.layer_type_list)


def _live_bytes(config: Any, state_config: Any) -> int:
    """Bytes that the host counts for the states of one running request."""
    conv = math.prod(state_config.conv_states_shape) * state_config.conv_states_dtype.itemsize
    ssm = math.prod(state_config.ssm_states_shape) * state_config.ssm_states_dtype.itemsize
    drafts = config.num_speculative_tokens
    copies = 1 + (drafts + 1 if drafts else 0)
    return int(_recurrent_layers(state_config) * (conv + ssm) * copies)


def _memory_bytes(config: Any) -> int:
    return int(config.buffer_size_gb * 2**30) + int((config.paused_buffer_size_gb or 0) * 2**30)


def _live_states(config: Any, state_config: Any) -> int | None:
    """How many requests' states fit into the memory that the host takes from KV blocks; None: no limit."""
    state_bytes = 0 if state_config is None else _live_bytes(config, state_config)
    if not state_bytes or (config.mamba_memory_ratio is None) is (config.max_requests is None):
        return None
    if config.mamba_memory_ratio is None:
        return (_memory_bytes(config) - 1) // state_bytes
    return int(_memory_bytes(config) * config.mamba_memory_ratio // state_bytes)


@override(STATE_CONFIG, "from_model", faults=(15,))
def from_model(original: Callable[..., Any], cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """List the layers also of a model or pipeline stage without Mamba layers, where stock returns None."""
    state_config = original(cls, model, *args, **kwargs)
    if state_config is not None:
        return state_config
    utilities = importlib.import_module("megatron.core.utils")
    layers = getattr(utilities.get_attr_wrapped_model(model, "decoder"), "layer_type_list", None)
    return None if layers is None else cls(layers, (), (), torch.float32, torch.float32)


@override(DYNAMIC_CONTEXT, "__init__", faults=(15,))
def init(original: Callable[..., None], self: Any, model_config: Any, inference_config: Any) -> None:
    """Let the stages of a pipeline exchange what they are before any stage sizes its pools. A collective.

    A stage without Mamba layers allocates slots without bytes, the smallest request limit of all stages
    counts, and all stages raise what any stage cannot do, because the others would wait for it.
    """
    group = _pipeline_group(model_config, inference_config)
    rank = 0 if group is None else torch.distributed.get_rank(group)
    config = agreed_config(inference_config, _gathered_stages(inference_config, group), rank)
    try:
        original(self, model_config, config)
    except ZeroDivisionError:  # megatron-core logs a summary that divides by the bytes of a state
        if self.num_mamba_layers or getattr(self, "mamba_slot_allocator", None) is None:
            raise


def _gathered_stages(config: Any, group: Any) -> list[Stage]:
    """The description of each stage. All stages raise where one of them has an unusable configuration."""
    if group is None:
        return [Stage.of(config)]
    try:
        own_stage: Any = Stage.of(config)
    except Exception as error:
        own_stage = f"{type(error).__name__}: {error}"
    stages = ParallelGroups(pipeline=group).gather(own_stage)
    for number, stage in enumerate(stages):
        if isinstance(stage, str):
            raise ValueError(f"pipeline stage {number} has an unusable configuration: {stage}")
    return stages


def _pipeline_group(model_config: Any, inference_config: Any) -> Any:
    """The pipeline group of the host, or None for a single stage."""
    if (collection := inference_config.pg_collection) is not None:
        group = collection.pp
    elif model_config.pipeline_model_parallel_size > 1:
        group = importlib.import_module("megatron.core.parallel_state").get_pipeline_model_parallel_group()
    else:
        return None
    return None if group is None or torch.distributed.get_world_size(group) == 1 else group


def agreed_config(config: Any, stages: Sequence[Stage], rank: int) -> Any:
    """The config with which stage `rank` decides as the others do: a copy where it changes."""
    with_states = [stage for stage in stages if stage.has_mamba]
    if stages[rank].state_config is not None and not with_states:
        return _replaced(config, mamba_inference_state_config=None)
    if len(stages) == 1 or not with_states:
        return config
    _check_stages(config, stages)
    budget = max(0, min(stage.state_budget_gb for stage in with_states)) or None
    if not stages[rank].has_mamba:
        layers = stages[rank].state_config.layer_type_list
        state_config = _replaced(with_states[0].state_config, layer_type_list=layers)
        return _replaced(
            config,
            mamba_inference_state_config=state_config,
            mamba_memory_ratio=None,
            prefix_caching_mamba_gb=budget,
        )
    ratio = config.mamba_memory_ratio
    fewest = min((stage.live_states for stage in with_states if stage.live_states is not None), default=None)
    if ratio is not None and fewest is not None and fewest != stages[rank].live_states:
        # The host divides this share by a state's bytes. For KV the host itself takes the stages' minimum.
        ratio = (fewest + 0.5) * _live_bytes(config, stages[rank].state_config) / _memory_bytes(config)
    return _replaced(
        config,
        mamba_memory_ratio=ratio,
        prefix_caching_mamba_gb=config.prefix_caching_mamba_gb if budget else None,
    )


def _replaced(config: Any, **changes: Any) -> Any:
    """A changed copy. `dataclasses.replace` would run the checks and log lines of InferenceConfig again."""
    changed_config = copy.copy(config)
    for name, value in changes.items():
        setattr(changed_config, name, value)
    return changed_config


def _check_stages(config: Any, stages: Sequence[Stage]) -> None:
    for number, stage in enumerate(stages):
        if stage.state_config is None:
            raise ValueError(
                f"pipeline stage {number} has no mamba_inference_state_config, and others have; accepted: "
                "MambaInferenceStateConfig.from_model(model), called after install(), on every stage"
            )
        if not _ATTENTION.intersection(stage.state_config.layer_type_list):
            raise NotImplementedError(
                f"pipeline stage {number} has the layers {''.join(stage.state_config.layer_type_list)!r}; "
                "megatron-core's DynamicInferenceContext needs an attention layer on every stage"
            )
        if config.mamba_memory_ratio is None:
            if stage.live_states is not None and stage.live_states < config.max_requests:
                raise ValueError(
                    f"max_requests is {config.max_requests}; accepted: at most {stage.live_states}, whose "
                    f"Mamba states fit into the buffer of pipeline stage {number}"
                )
        elif config.max_requests is None and not stage.has_mamba:
            raise ValueError(
                "max_requests is None; accepted: a number, as mamba_memory_ratio says nothing to pipeline "
                f"stage {number}, which has no Mamba layers"
            )
