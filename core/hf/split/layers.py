"""How attention, MLPs and experts of transformers are split: by heads, by columns, and expert by expert."""

from ...validation import shown
from .module_split import ModuleSplit
from .weight_part import part_of, shifted, span, uneven_part_of

_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def split_attention(split: ModuleSplit) -> None:
    """Attention by heads. Where there are fewer KV heads than ranks, several ranks hold the same KV head."""
    attention = split.module
    config, head_dim = attention.config, attention.head_dim
    heads = part_of(config.num_attention_heads, split.groups)
    kv = span(part_of(config.num_key_value_heads, split.groups), head_dim)
    # With a gate of the output, a head's rows are its query and its gate.
    split.rows("q_proj", [span(heads, attention.q_proj.out_features // config.num_attention_heads)])
    split.rows("k_proj", [kv])
    split.rows("v_proj", [kv])
    split.columns("o_proj" if hasattr(attention, "o_proj") else "out_proj", [span(heads, head_dim)])


def split_mlp(split: ModuleSplit) -> None:
    """An MLP by the columns between its projections."""
    mlp = split.module
    if hasattr(mlp, "input_linear"):  # the gate's rows, then those of the up projection
        width = mlp.output_linear.in_features
        own = span(part_of(width, split.groups), 1)
        split.rows("input_linear", [own, *shifted([own], width)])
        split.columns("output_linear", [own])
        return
    *first, last = next((names for names in _GATED if hasattr(mlp, names[0])), ("up_proj", "down_proj"))
    own = span(part_of(getattr(mlp, last).in_features, split.groups), 1)
    for name in first:
        split.rows(name, [own])
    split.columns(last, [own])


def mlp_width(mlp: object) -> int:
    """The columns between the projections of a whole MLP."""
    last = next(name for name in ("output_linear", "down_proj", "w2") if hasattr(mlp, name))
    width: int = getattr(mlp, last).in_features
    return width


def split_experts(split: ModuleSplit) -> None:
    """Whole experts. A token's experts on other ranks get the number behind the last expert of this rank."""
    experts = split.module
    part = uneven_part_of(experts.num_experts, split.groups)
    for name, weight in experts.named_parameters(recurse=False):
        if weight.shape[0] != part.total:
            raise ValueError(
                f"{name} of {type(experts).__name__} has the shape {shown(tuple(weight.shape))}; accepted: "
                f"one row for each of {part.total} experts"
            )
        split.tensor(name, [span(part, 1)])
    split.sizes |= {
        "num_experts": part.count,
        "_is_expert_parallel": True,  # transformers then skips the number behind the last expert
        "mambaslots_experts": part,
    }


def split_latent_experts(split: ModuleSplit) -> None:
    """A mixture of experts of Nemotron-H: its last projection multiplies sums that are yet to be added up."""
    if hasattr(split.module.fc2_latent_proj, "bias"):
        split.on_first_rank("fc2_latent_proj")
