"""How mixers of transformers are split: by heads, and by the groups or key heads that heads share."""

from .module_split import ModuleSplit
from .weight_part import part_of, shifted, span


def split_mamba2(split: ModuleSplit) -> None:
    """A Mamba-2 mixer. Rows of `in_proj` are the gate, x, B, C and the time steps."""
    mixer = split.module
    inner, width = mixer.intermediate_size, mixer.ssm_state_size
    heads, groups = part_of(mixer.num_heads, split.groups), part_of(mixer.n_groups, split.groups)
    x = span(heads, mixer.head_dim)
    conv = [x, span(groups, width, inner), span(groups, width, inner + mixer.n_groups * width)]
    projected = [x, *shifted(conv, inner), span(heads, 1, inner + mixer.conv_dim)]
    split.rows("in_proj", projected)
    split.rows("conv1d", conv)
    for name in ("A_log", "D", "dt_bias"):
        split.tensor(name, [span(heads, 1)])
    if getattr(mixer, "norm", None) is not None and getattr(mixer, "mamba_rms_norm", True):
        split.tensor("norm.weight", [x])
    if hasattr(mixer, "mup_vector"):
        split.tensor("mup_vector", projected, dim=2)
    split.columns("out_proj", [x])
    split.sizes |= {
        "num_heads": heads.count,
        "n_groups": groups.count,
        "intermediate_size": len(x),
        "conv_dim": sum(map(len, conv)),
    }


def split_gated_delta_net(split: ModuleSplit) -> None:
    """A gated delta net of Qwen3-Next or Qwen3.5; value heads of a rank read key heads of the same rank."""
    mixer = split.module
    key_dim, value_dim = mixer.head_k_dim, mixer.head_v_dim
    keys, heads = part_of(mixer.num_k_heads, split.groups), part_of(mixer.num_v_heads, split.groups)
    q, v = span(keys, key_dim), span(heads, value_dim)
    conv = [q, *shifted([q], mixer.key_dim), *shifted([v], 2 * mixer.key_dim)]
    if hasattr(mixer, "in_proj_qkvz"):
        _split_interleaved(split)
    else:
        split.rows("in_proj_qkv", conv)
        split.rows("in_proj_z", [v])
        split.rows("in_proj_b", [span(heads, 1)])
        split.rows("in_proj_a", [span(heads, 1)])
    split.rows("conv1d", conv)
    for name in ("A_log", "dt_bias"):
        split.tensor(name, [span(heads, 1)])
    split.columns("out_proj", [v])
    split.sizes |= {
        "num_k_heads": keys.count,
        "num_v_heads": heads.count,
        "key_dim": len(q),
        "value_dim": len(v),
        "conv_dim": sum(map(len, conv)),
    }


def _split_interleaved(split: ModuleSplit) -> None:
    """Qwen3-Next's rows: for each key head q, k, and of its value heads v and the gates; then b and a."""
    mixer = split.module
    key_dim, value_dim = mixer.head_k_dim, mixer.head_v_dim
    keys, heads = part_of(mixer.num_k_heads, split.groups), part_of(mixer.num_v_heads, split.groups)
    per_key = mixer.num_v_heads // mixer.num_k_heads
    qkvz, ba = [], []
    for key in keys.indices:
        first, last = max(heads.start, key * per_key), min(heads.stop, (key + 1) * per_key)
        own = range(first - key * per_key, last - key * per_key)
        begin = key * 2 * (key_dim + per_key * value_dim)
        values = range(own.start * value_dim, own.stop * value_dim)
        qkvz.append(range(begin, begin + 2 * key_dim))
        qkvz += shifted([values], begin + 2 * key_dim)
        qkvz += shifted([values], begin + 2 * key_dim + per_key * value_dim)
        ba += [*shifted([own], key * 2 * per_key), *shifted([own], key * 2 * per_key + per_key)]
    split.rows("in_proj_qkvz", qkvz)
    split.rows("in_proj_ba", ba)


def split_short_conv(split: ModuleSplit) -> None:
    """A short convolution of LFM2. Rows of `in_proj` are two gates and what is convolved."""
    mixer = split.module
    hidden = mixer.conv.out_channels
    own = span(part_of(hidden, split.groups), 1)
    split.rows("in_proj", [own, *shifted([own], hidden), *shifted([own], 2 * hidden)])
    split.rows("conv", [own])
    split.columns("out_proj", [own])
