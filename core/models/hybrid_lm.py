"""A small real language model of recurrent mixers, attention and MLPs."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from ..files import ModelFolderError, existing_folder
from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import kernel_set
from ..layers.over_ranks import head_logits, sum_over_ranks
from ..layers.weight_part import vocabulary_part_of
from ..parallel_groups import ParallelGroups, checked_groups
from ..state_spec import HybridStateSpec
from ..validation import device as checked_device
from ..validation import float_dtype, instance, integer
from .hybrid_config import HybridConfig
from .mixers import MIXERS
from .weights import ModelWeights, RandomWeights, SavedWeights, WeightSource, read_config, write


class HybridLM(nn.Module):
    """A token embedding, residual layers in the order of `config.pattern`, a norm and an untied LM head.

    Each layer normalises its input. The weights are random, need no gradients, and depend on `seed` and the
    kind of `device` alone. Their scale makes the caches matter: the slowest Mamba heads remember hundreds of
    tokens, the fastest tens, and logits have a standard deviation of a few units.

    A model can be split over ranks as in Megatron. Each rank draws all weights and keeps its part: heads, MLP
    columns and vocabulary rows over the tensor group, consecutive layers over the pipeline group. A step runs
    the stages one after the other, and all ranks get all logits.

    Args:
        config: the shape. `HybridConfig.tiny()` has 256 tokens and seven layers.
        seed: of the weights.
        device: where the weights are drawn. A GPU draws other weights than a CPU.
        groups: the ranks that the model is split over; None for one rank.
    """

    def __init__(
        self, config: HybridConfig, seed: int = 0, device: torch.device | str = "cpu",
        groups: ParallelGroups | None = None,
    ) -> None:  # fmt: skip
        device = checked_device("device", device)
        source = RandomWeights(integer("seed", seed, 0, (1 << 63) - 1), device)
        self._make(instance("config", config, HybridConfig), source, device, groups)

    def _make(
        self, config: HybridConfig, source: WeightSource, device: torch.device, groups: ParallelGroups | None
    ) -> None:
        super().__init__()
        self.config = config
        self.groups = groups = checked_groups(groups)
        self._ranks = groups if groups.tensor_size > 1 else None
        self._is_first_stage = groups.is_first_stage
        self._is_last_stage = groups.is_last_stage
        self.weights_name = source.name
        weights = ModelWeights(config, source, device, groups)
        self.shard = config.shard(groups)
        embedding = weights.normal("embedding", config.vocab_size, config.hidden_size, std=1.0)
        self.layers = nn.ModuleList()
        first, stop = config.stage_layers(groups)
        for index, kind in enumerate(config.pattern):
            layer_index = config.pattern[first:index].count(kind)
            weights.prefix = f"layers.{index}."
            layer = MIXERS[kind](config, layer_index, weights)
            if first <= index < stop:
                self.layers.append(layer)
        weights.prefix = ""
        num_layers = len(config.pattern)
        norms = [weights.full(f"norms.{index}", config.hidden_size, 1.0) for index in range(num_layers)]
        self.norms = nn.ParameterList(norms[first:stop])
        final_norm = weights.full("final_norm", config.hidden_size, 1.0)
        rows = [vocabulary_part_of(config.vocab_size, groups).indices]
        lm_head = weights.linear("lm_head", config.vocab_size, config.hidden_size, gain=3.0, rows=rows)
        if self._is_first_stage:
            self.embedding = embedding
        if self._is_last_stage:
            self.final_norm = final_norm
            self.lm_head = lm_head
        self.eval()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
        groups: ParallelGroups | None = None,
    ) -> Self:  # fmt: skip
        """The model that `save_pretrained` wrote.

        Args:
            folder: has `config.json` and `model.safetensors`.
            device: where the weights go.
            dtype: of the model; None for the dtype that it was saved in.
            groups: the ranks that the model is split over; None for one rank.

        Raises:
            ValueError: names a file that is missing or wrong, or a weight that does not fit.
        """
        if (path := existing_folder("folder", folder)) is None:
            raise ModelFolderError(f"folder is {str(folder)!r}; accepted: a folder that is there")
        config = read_config(path, dtype)
        source = SavedWeights(path)
        model = cls.__new__(cls)
        model._make(config, source, checked_device("device", device), groups)
        source.check_all_taken()
        return model

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write `config.json` and `model.safetensors` into `folder`, which is made if it is not there.

        Args:
            dtype: in which weights are stored; None for the model's. Decays and time steps are stored in
                float32 or wider.

        Raises:
            ValueError: this rank holds a part of the model only.
        """
        if self.groups.size > 1:
            raise ValueError(f"the model is split over {self.groups.size} ranks; accepted: a whole model")
        dtype = self.config.dtype if dtype is None else float_dtype("dtype", dtype)
        write(Path(folder), self.config, self.state_dict(), dtype)

    def state_spec(self) -> HybridStateSpec:
        """What a context allocates for this model, on the device of the weights.

        Raises:
            ImportError: the device's kernels need a package that is not installed.
            ValueError: the device's kernels cannot compute these states.
        """
        config = self.config
        device = self.norms[0].device
        kernels = kernel_set(device, config.dtype)
        spec = HybridStateSpec(
            states=config.states(self.groups),
            num_attention_layers=self.shard.attention_layers.count,
            num_kv_heads=self.shard.kv_heads.count,
            head_dim=config.head_dim,
            kv_dtype=config.dtype,
            vocab_size=config.vocab_size,
            device=device,
            supports_replay=True,
            strided_blocks=True,
            shard=self.shard,
            groups=self.groups,
            model=f"{config}, {self.weights_name}",
        )
        kernels.check_states(spec)
        return spec

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of `inputs.logit_tokens`, [L, vocab_size] in float32 or wider.

        Writes the step's keys and values into `inputs.kv_cache` and its states into `inputs.state_pool`.
        """
        config = self.config
        device = inputs.token_ids.device
        kernels = kernel_set(device, config.dtype)
        eps = config.norm_eps
        if self._is_first_stage:
            hidden = self.embedding[inputs.token_ids]
        else:
            shape = len(inputs.token_ids), config.hidden_size
            hidden = torch.empty(shape, dtype=config.dtype, device=device)
            self.groups.receive_from_previous_stage(hidden)
        added: Tensor | None = None  # the last layer's output, which the next norm adds to `hidden`
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if added is None:
                normed = kernels.rms_norm(hidden, norm, eps)
            else:
                hidden, normed = kernels.add_rms_norm(hidden, added, norm, eps)
            added = sum_over_ranks(layer(normed, inputs, kernels), self._ranks, kernels)
        assert added is not None, "a stage has at least one layer"
        if self._is_last_stage:
            rows = inputs.logit_tokens
            _, normed = kernels.add_rms_norm(hidden[rows], added[rows], self.final_norm, eps)
            logits = head_logits(normed, self.lm_head, config.vocab_size, self._ranks, kernels)
        else:
            self.groups.send_to_next_stage(hidden + added)
            shape = len(inputs.logit_tokens), config.vocab_size
            logits = torch.empty(shape, dtype=config.compute_dtype, device=device)
        if self._is_first_stage and self._is_last_stage:
            return logits
        return self.groups.share_from_last_stage(logits)
