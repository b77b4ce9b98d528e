"""A model of transformers that the engine serves."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import kernel_set
from ..parallel_groups import ParallelGroups, checked_groups
from ..state_spec import HybridStateSpec
from . import architectures
from .current_step import CurrentStep
from .fused_modules import ATTENTION_NAME, EXPERTS_NAME, AttentionForward, register_with_transformers
from .joint_linear import join_weights
from .layer_forwards import modules_of, replace_forwards
from .moved_hooks import names_moved_hooks
from .split import ModelSplit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ServedModel:
    """A causal language model of transformers over paged KV and states by slot.

    The modules of `model` are changed, instance by instance: the forwards of mixers are replaced, and those
    of norms, layers, MLPs, attention and head, which the kernels compute in fewer launches. Embeddings,
    rotary angles, routers and experts are computed by transformers' own modules. Weights need no gradients.
    Those that read the same input become views of one tensor.

    The model computes one step at a time; two threads must not call it at once.

    Args:
        model: a model of `architectures.ARCHITECTURES`, with its weights or on the meta device. It is of no
            use outside the served model afterwards.
        groups: the ranks that the model is split over; None for one rank. Each rank passes the same whole
            model, or one whose weights `load` read in parts, and keeps its part: heads, columns of MLPs,
            experts, rows of the head. Example: 32 heads over 4 ranks are 8 heads each.

    Raises:
        ValueError: the architecture, a mixer, or something that the config asks for, is not served, or cannot
            be split over `groups`.
    """

    @names_moved_hooks
    def __init__(self, model: "PreTrainedModel", groups: ParallelGroups | None = None) -> None:
        self.groups = checked_groups(groups)
        self.config = architectures.text_config(model.config)
        self._architecture = architectures.ARCHITECTURES[self.config.model_type]
        accepted = self._architecture.prefix + "ForCausalLM"
        if type(model).__name__ != accepted:
            raise ValueError(f"model is a {type(model).__name__}; accepted: a {accepted}")
        self.model = model.eval().requires_grad_(False)
        ModelSplit.of(self.model, self.config, self.groups).apply()
        self._step = CurrentStep(self.groups)
        register_with_transformers()
        self._replace_mixers_and_attention()
        self._stack = replace_forwards(self.model, self.config, self._architecture, self._step)
        if getattr(self.config, "num_experts_per_tok", None):
            model.set_experts_implementation(EXPERTS_NAME)
        join_weights(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def state_spec(self) -> HybridStateSpec:
        """What a context allocates for this model; joins weights that were replaced.

        Raises an ImportError or a ValueError where the device's kernels cannot compute these states.
        """
        kernels = kernel_set(self.device, self.dtype)
        spec = architectures.state_spec(self.config, self.dtype, self.device, self.groups)
        kernels.check_states(spec)
        join_weights(self.model)
        return spec

    @names_moved_hooks
    @torch.no_grad()
    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits of `inputs.logit_tokens`, [L, vocab_size] in float32 or wider.

        Writes the step's keys and values into `inputs.kv_cache` and its states into `inputs.state_pool`.
        What is not transformers' does not synchronise.
        """
        model = cast(Any, self.model)
        kernels = kernel_set(inputs.token_ids.device, self.dtype)
        with self._step.running(inputs, kernels):
            if self._stack is not None:
                hidden = self._stack(inputs.token_ids, inputs.positions)
                logits: Tensor = model.lm_head(hidden[inputs.logit_tokens])
            else:
                logits = model(
                    input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False,
                    return_dict=True, logits_to_keep=inputs.logit_tokens,
                ).logits[0]  # fmt: skip
        return logits.to(kernels.compute_dtype(logits.dtype))

    @property
    def _embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def _replace_mixers_and_attention(self) -> None:
        architecture = self._architecture
        for layer, mixer in enumerate(self._modules(architecture.mixer, architecture.mixer_layers)):
            forward = architecture.forward(mixer, layer, self._step)
            mixer.forward = self._step.summing(forward) if architecture.layer is None else forward
        if architecture.attention_layers:
            for layer, module in enumerate(self._modules("Attention", architecture.attention_layers)):
                module.forward = AttentionForward(module, layer, self._step, architecture.norm_offset)
            self.model.set_attn_implementation(ATTENTION_NAME)

    def _modules(self, kind: str, layer_types: frozenset[str]) -> list[nn.Module]:
        """The modules of a class, of which the config names as many layers; else a ValueError."""
        config: Any = self.config
        name = self._architecture.prefix + kind
        modules = modules_of(self.model, name)
        num_layers = sum(layer_type in layer_types for layer_type in config.layer_types)
        if len(modules) != num_layers:
            raise ValueError(
                f"the model has {len(modules)} modules {name}; accepted: {num_layers}, as many as "
                f"config.layer_types names {' or '.join(sorted(layer_types))}"
            )
        return modules
