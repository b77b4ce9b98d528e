"""Corrections of pipeline stages that decide alone: all of them skip, evict and admit alike, or refuse."""

import copy
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..parallel_groups import ParallelGroups
from .host_record import DYNAMIC_CONTEXT, STATE_CONFIG
from .overrides import override

_MAMBA, _ATTENTION = "M", frozenset("*D")  # megatron-core's letters of layers; D: sparse attention


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage tells its peers before it builds its context.

    Attributes:
        states: its MambaInferenceStateConfig; without Mamba layers one of its layers only, or None.
        state_budget_gb: for durable states; 0 for none.
        live_states: running requests whose states fit where the host sets memory aside; None: any number.
    """

    states: Any
    state_budget_gb: float
    live_states: int | None

    @classmethod
    def of(cls, config: Any) -> "Stage":
        """`config` is the stage's InferenceConfig."""
        states = config.mamba_inference_state_config
        return cls(states, config.prefix_caching_mamba_gb or 0, _live_states(config, states))

    @property
    def has_mamba(self) -> bool:
        return self.states is not None and _MAMBA in self.states.layer_type_list


def _live_bytes(config: Any, states: Any) -> int:
    """What the host counts for the states of one running request."""
    conv = math.prod(states.conv_states_shape) * states.conv_states_dtype.itemsize
    ssm = math.prod(states.ssm_states_shape) * states.ssm_states_dtype.itemsize
    drafts = config.num_speculative_tokens
    copies = 1 + (drafts + 1 if drafts else 0)
    return int(states.layer_type_list.count(_MAMBA) * (conv + ssm) * copies)


def _memory_bytes(config: Any) -> int:
    return int(config.buffer_size_gb * 2**30) + int((config.paused_buffer_size_gb or 0) * 2**30)


def _live_states(config: Any, states: Any) -> int | None:
    """The host takes memory from the KV blocks for `max_requests` states, or for what a share of it holds."""
    one = 0 if states is None else _live_bytes(config, states)
    if not one or (config.mamba_memory_ratio is None) is (config.max_requests is None):
        return None
    if config.mamba_memory_ratio is None:
        return (_memory_bytes(config) - 1) // one
    return int(_memory_bytes(config) * config.mamba_memory_ratio // one)


@override(STATE_CONFIG, "from_model", part="sizing", faults=(15,))
def from_model(original: Callable[..., Any], cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Name the layers of a model, or pipeline stage, without Mamba layers, too.

    The stock method returns None for it; its context then takes every layer for attention, and the stage
    for one of a model that has no states. What the stage is, `DynamicInferenceContext` asks its peers.
    """
    states = original(cls, model, *args, **kwargs)
    if states is not None:
        return states
    utilities = importlib.import_module("megatron.core.utils")
    layers = getattr(utilities.get_attr_wrapped_model(model, "decoder"), "layer_type_list", None)
    return None if layers is None else cls(layers, (), (), torch.float32, torch.float32)


@override(DYNAMIC_CONTEXT, "__init__", part="sizing", faults=(15,))
def init(original: Callable[..., None], self: Any, model_config: Any, inference_config: Any) -> None:
    """Let the stages of a pipeline agree on what they are before any of them sizes anything; collective.

    With the stock method a stage without Mamba layers does not know that its model has states: it skips
    on the KV match alone. With `mamba_memory_ratio` stages with fewer Mamba layers admit more requests. A
    stage that cannot be built raises, and its peers wait for it until the process group gives up.

    Here a stage without Mamba layers keeps the books of states that have no bytes, the fewest requests
    count, and what one stage cannot do is raised by all: NotImplementedError for a stage without attention
    layers, which megatron-core does not run, ValueError for sizes. Where a stage is built with other numbers
    than it was given, the context's `config` is a copy.
    """
    group = _pipeline_group(model_config, inference_config)
    rank = 0 if group is None else torch.distributed.get_rank(group)
    agreed = agreed_config(inference_config, _stages(inference_config, group), rank)
    try:
        original(self, model_config, agreed)
    except ZeroDivisionError:  # 0.19 ends with a summary that divides by the bytes of a state
        if self.num_mamba_layers or getattr(self, "mamba_slot_allocator", None) is None:
            raise


def _stages(config: Any, group: Any) -> list[Stage]:
    """What each stage is; where one of them cannot say, an error on all."""
    if group is None:
        return [Stage.of(config)]
    try:
        here: Any = Stage.of(config)
    except Exception as error:
        here = f"{type(error).__name__}: {error}"
    told = ParallelGroups(pipeline=group).gather(here)
    for number, stage in enumerate(told):
        if isinstance(stage, str):
            raise ValueError(f"pipeline stage {number} has an unusable configuration: {stage}")
    return told


def _pipeline_group(model_config: Any, inference_config: Any) -> Any:
    """The group of the host's own collectives, or None where there is one stage."""
    if (collection := inference_config.pg_collection) is not None:
        group = collection.pp
    elif model_config.pipeline_model_parallel_size > 1:
        group = importlib.import_module("megatron.core.parallel_state").get_pipeline_model_parallel_group()
    else:
        return None
    return None if group is None or torch.distributed.get_world_size(group) == 1 else group


def agreed_config(config: Any, stages: Sequence[Stage], rank: int) -> Any:
    """The InferenceConfig with which stage `rank` does as its peers do; `config` itself is not changed.

    The same error on every stage where one of them cannot be built.
    """
    with_states = [stage for stage in stages if stage.has_mamba]
    if stages[rank].states is not None and not with_states:
        return _with(config, mamba_inference_state_config=None)
    if len(stages) == 1 or not with_states:
        return config
    _check(config, stages)
    budget = max(0, min(stage.state_budget_gb for stage in with_states)) or None
    if not stages[rank].has_mamba:
        states = _with(with_states[0].states, layer_type_list=stages[rank].states.layer_type_list)
        return _with(
            config,
            mamba_inference_state_config=states,
            mamba_memory_ratio=None,
            prefix_caching_mamba_gb=budget,
        )
    ratio = config.mamba_memory_ratio
    fewest = min((stage.live_states for stage in with_states if stage.live_states is not None), default=None)
    if ratio is not None and fewest is not None and fewest != stages[rank].live_states:
        # The host divides by the bytes of one. KV gets the rest: there the host takes the minimum itself.
        ratio = (fewest + 0.5) * _live_bytes(config, stages[rank].states) / _memory_bytes(config)
    return _with(
        config,
        mamba_memory_ratio=ratio,
        prefix_caching_mamba_gb=config.prefix_caching_mamba_gb if budget else None,
    )


def _with(config: Any, **changes: Any) -> Any:
    """A copy; `dataclasses.replace` would let the host's InferenceConfig check and print itself again."""
    changed = copy.copy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _check(config: Any, stages: Sequence[Stage]) -> None:
    for number, stage in enumerate(stages):
        if stage.states is None:
            raise ValueError(
                f"pipeline stage {number} has no mamba_inference_state_config, and others have; accepted: "
                "MambaInferenceStateConfig.from_model(model), called after install(), on every stage"
            )
        if not _ATTENTION.intersection(stage.states.layer_type_list):
            raise NotImplementedError(
                f"pipeline stage {number} has the layers {''.join(stage.states.layer_type_list)!r}; "
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
