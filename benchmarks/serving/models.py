"""The models that `gpu_serving.py` serves, with random weights, and the engines that serve them.

HybridLM in the shape of Nemotron-H-8B; Nemotron-H-8B and Qwen3.5-4B as transformers builds them from their
configs. `--shape tiny` narrows all three.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mambaslots as ms
import torch
from support.command_line import add_count
from torch import Tensor, nn

MODELS = ("HybridLM-8B", "Nemotron-H-8B", "Qwen3.5-4B")
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 131072, "hidden_size": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "mamba_num_groups": 8, "mamba_state_dim": 128, "conv_kernel": 4, "ssd_chunk_size": 128,
        "num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mlp_hidden_size": 21504,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "mamba_num_groups": 2, "mamba_state_dim": 16, "conv_kernel": 4, "ssd_chunk_size": 16,
        "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_hidden_size": 128,
    },
}  # fmt: skip
TINY_LAYERS = 8
BLOCK = 256


def add_hybrid_shape(parser: argparse.ArgumentParser) -> None:
    """`--shape` and `--layers` of a `HybridLM` with `HYBRID_SHAPES` and `PATTERN`."""
    parser.add_argument(
        "--shape", choices=HYBRID_SHAPES, default="8b", help="of the model (default: %(default)s)"
    )
    add_count(parser, "--layers", len(PATTERN), "only the first layers")


@dataclass(frozen=True)
class Lengths:
    """How much is measured; lengths are tokens.

    Attributes:
        prefills: of the prompts that are computed whole.
        compared: the prefill with and without checkpoints, and beside transformers.
        rows: how many requests decode at once.
        context: prompt of each request that decodes.
        steps: timed decode steps.
        users, turns, shared, turn, answer: the conversations.
    """

    prefills: tuple[int, ...] = (512, 4096, 16384)
    compared: int = 4096
    rows: tuple[int, ...] = (1, 8, 32, 128)
    context: int = 3000
    steps: int = 100
    users: int = 12
    turns: int = 4
    shared: int = 1024
    turn: int = 400
    answer: int = 48


FULL = Lengths()
TINY = Lengths((256, 512), 512, (1, 2), 300, 8, 2, 2, 256, 64, 4)


@dataclass
class ServingModel:
    """A model that an engine serves.

    Attributes:
        model: what the engine calls.
        products: the weights [out, in] of the linear layers, in the model's order; without the head.
        head: the weight [vocabulary, hidden] of the head.
        weight_bytes: what a step reads of the weights: all of them, without an embedding that is no head.
        all_weight_bytes: with the embedding.
        forward_of_transformers: transformers' own forward of the same weights, on ids [1, tokens]; None for a
            model that is not transformers'. It works until `served` is called.
        settings: more settings of `ms.InferenceConfig`, which every engine has.
    """

    name: str
    device: torch.device
    lengths: Lengths
    model: Any
    products: list[Tensor]
    head: Tensor
    weight_bytes: int
    all_weight_bytes: int
    forward_of_transformers: Callable[[Tensor], Tensor] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draw = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        vocabulary = self.head.shape[0]
        return [self._draw.randrange(vocabulary) for _ in range(count)]

    def serve(self) -> None:
        """Let the engine's forward take the place of transformers'."""
        if self.forward_of_transformers is not None:
            from mambaslots.hf.served_model import ServedModel

            self.forward_of_transformers = None
            self.model = ServedModel(self.model)

    def engine(
        self,
        *,
        rows: int,
        length: int,
        tokens_per_step: int,
        slots: int,
        graphs: int | None = None,
        caching: bool = True,
        model: Any = None,
    ) -> ms.DynamicInferenceEngine:
        """An engine for `rows` requests of at most `length` tokens; `model`: in place of the model."""
        config = ms.InferenceConfig(
            block_size_tokens=BLOCK,
            max_requests=rows,
            max_tokens_per_step=max(tokens_per_step, rows, BLOCK),
            max_sequence_length=length,
            num_kv_blocks=rows * -(-length // BLOCK) + 8,
            num_mamba_slots=slots if caching else None,
            enable_prefix_caching=caching,
            num_cuda_graphs=graphs,
            **({"batch_invariant": False} | self.settings),
        )
        return ms.DynamicInferenceEngine(self.model if model is None else model, config)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build(
    name: str, shape: str, device: torch.device, dtype_of_cpu: torch.dtype = torch.float32
) -> ServingModel:
    """One of `MODELS`, in bfloat16 on a GPU and in `dtype_of_cpu` on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else dtype_of_cpu
    lengths = FULL if shape == "full" else TINY
    if name == "HybridLM-8B":
        pattern = PATTERN if shape == "full" else PATTERN[: 2 * TINY_LAYERS]
        config = ms.models.HybridConfig(
            pattern=pattern, dtype=dtype, **HYBRID_SHAPES["8b" if shape == "full" else "tiny"]
        )
        model = ms.models.HybridLM(config, seed=0, device=device)
        layers: nn.Module = model.layers
        head, embedding = model.lm_head, model.embedding
        products = [weight for weight in layers.parameters() if _is_product(weight)]
        return ServingModel(name, device, lengths, model, products, head, *_bytes(model, head, embedding))
    from real_models import config_of, random_model

    theirs = random_model(
        config_of(name, None if shape == "full" else TINY_LAYERS, shape == "tiny"), dtype, device
    )
    theirs = theirs.eval().requires_grad_(False)
    head, embedding = theirs.get_output_embeddings().weight, theirs.get_input_embeddings().weight
    products = [
        module.weight
        for module in theirs.modules()
        if isinstance(module, nn.Linear) and module.weight.data_ptr() != head.data_ptr()
    ]

    @torch.no_grad()
    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = theirs(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    theirs.set_attn_implementation("sdpa")
    sizes = _bytes(theirs, head, embedding)
    return ServingModel(name, device, lengths, theirs, products, head, *sizes, forward)


def _is_product(weight: Tensor) -> bool:
    """Whether a parameter of a mixer is the weight of a linear layer, and no filter of a convolution."""
    return weight.dim() == 2 and min(weight.shape) > 8


def _bytes(model: nn.Module, head: Tensor, embedding: Tensor) -> tuple[int, int]:
    every = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    if embedding.data_ptr() == head.data_ptr():
        return every, every
    return every - embedding.numel() * embedding.itemsize, every
