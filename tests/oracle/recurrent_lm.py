"""A `HybridLM` computed one token at a time in float64 numpy, straight from its definition.

Independent of the package: of the model only `config` and `state_dict()` are read.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]

_GRID, _MAX_SEEN = 8, 2000
"""Sequences of so many tokens, and multiples of it, are remembered; at most so many of a model."""


class RecurrentLM:
    """One sequence. `step(token)` advances it and returns the logits after that token.

    `logits`, `generate_greedy` and `states_after` begin a new sequence each, and leave the object at its end.

    Attributes:
        states: by the names that `HybridStateSpec.states` has, [layers, ...]. A window holds raw inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.weights: dict[str, Array] = {
            name: weight.detach().double().cpu().numpy() for name, weight in model.state_dict().items()
        }
        self.layers: list[dict[str, Array]] = [{} for _ in self.config.pattern]
        for name, weight in self.weights.items():
            if name.startswith("layers."):
                _, index, own_name = name.split(".", 2)
                self.layers[int(index)][own_name] = weight
        self._seen: dict[tuple[int, ...], tuple[dict[str, Array], list[Array], list[Array], Array]] = {}
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence."""
        c = self.config
        layers = Counter(c.pattern)
        conv_dim = c.mamba_num_heads * c.mamba_head_dim + 2 * c.mamba_num_groups * c.mamba_state_dim
        keys, values = c.delta_num_key_heads * c.delta_key_dim, c.delta_num_value_heads * c.delta_value_dim
        shapes = {
            "conv": ("M", conv_dim, c.conv_kernel - 1),
            "ssm": ("M", c.mamba_num_heads, c.mamba_head_dim, c.mamba_state_dim),
            "gdn_conv": ("G", 2 * keys + values, c.conv_kernel - 1),
            "delta": ("G", c.delta_num_value_heads, c.delta_key_dim, c.delta_value_dim),
            "short_conv": ("C", c.hidden_size, c.short_conv_kernel - 1),
        }
        self.states = {
            name: np.zeros((layers[kind], *shape)) for name, (kind, *shape) in shapes.items() if layers[kind]
        }
        attention = layers["*"]
        self.keys = [np.zeros((0, c.num_kv_heads, c.head_dim)) for _ in range(attention)]
        self.values = [np.zeros((0, c.num_kv_heads, c.head_dim)) for _ in range(attention)]
        self.position = 0

    def step(self, token: int) -> Array:
        """Take one token; logits [vocab_size] for the next one."""
        c, w = self.config, self.weights
        hidden = w["embedding"][token]
        seen: Counter[str] = Counter()
        blocks = {
            "M": self._mamba,
            "G": self._gated_delta_net,
            "C": self._short_conv,
            "*": self._attention,
            "-": self._mlp,
        }
        for index, kind in enumerate(c.pattern):
            x = rms_norm(hidden, w[f"norms.{index}"], c.norm_eps)
            hidden = hidden + blocks[kind](self.layers[index], seen[kind], x)
            seen[kind] += 1
        self.position += 1
        return w["lm_head"] @ rms_norm(hidden, w["final_norm"], c.norm_eps)

    def logits(self, tokens: Iterable[int]) -> Tensor:
        """[n, vocab_size] float64: after each token."""
        self.reset()
        return torch.from_numpy(np.stack([self.step(int(token)) for token in tokens]))

    def generate_greedy(self, prompt: Iterable[int], n: int) -> tuple[list[int], list[float]]:
        """n tokens after the prompt, and their log-probs."""
        prompt = [int(token) for token in prompt]
        logits = self._after(prompt)
        tokens, log_probs = [], []
        for _ in range(n):
            token = int(logits.argmax())
            tokens.append(token)
            log_probs.append(float(logits[token] - log_sum_exp(logits)))
            if len(tokens) < n:
                logits = self.step(token)
                self._remember(prompt + tokens, logits)
        return tokens, log_probs

    def _after(self, tokens: list[int]) -> Array:
        """The logits after a sequence, which begins where an earlier one was of the same tokens."""
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        done = len(tokens) // _GRID * _GRID
        while done and tuple(tokens[:done]) not in self._seen:
            done -= _GRID
        self.reset()
        logits = np.zeros(0)
        if done:
            states, keys, values, logits = self._seen[tuple(tokens[:done])]
            self.states = {name: state.copy() for name, state in states.items()}
            self.keys, self.values, self.position = [*keys], [*values], done
        for number, token in enumerate(tokens[done:], done + 1):
            logits = self.step(token)
            self._remember(tokens[:number], logits)
        return logits

    def _remember(self, tokens: list[int], logits: Array) -> None:
        if len(tokens) % _GRID == 0:
            states = {name: state.copy() for name, state in self.states.items()}
            self._seen[tuple(tokens)] = states, [*self.keys], [*self.values], logits

    def states_after(self, tokens: Iterable[int]) -> dict[str, Tensor]:
        """Copies of `states`."""
        self._after([int(token) for token in tokens])
        return self.states_now()

    def states_now(self) -> dict[str, Tensor]:
        """Copies of `states`."""
        return {name: torch.from_numpy(states.copy()) for name, states in self.states.items()}

    def _convolve(self, name: str, layer: int, raw: Array, weight: Array) -> Array:
        """The newest output of a depthwise convolution, whose window moves on by `raw`."""
        window = np.concatenate([self.states[name][layer], raw[:, None]], axis=1)
        self.states[name][layer] = window[:, 1:]
        return (window * weight).sum(axis=1)

    def _mamba(self, w: dict[str, Array], layer: int, x: Array) -> Array:
        c = self.config
        inner, groups = c.mamba_num_heads * c.mamba_head_dim, c.mamba_num_groups
        projected = w["in_proj"] @ x
        gate, raw, dt = parts(projected, inner, projected.size - c.mamba_num_heads)

        xBC = silu(self._convolve("conv", layer, raw, w["conv_weight"]) + w["conv_bias"])

        x_heads = xBC[:inner].reshape(c.mamba_num_heads, c.mamba_head_dim)
        B, C = xBC[inner:].reshape(2, groups, c.mamba_state_dim).repeat(c.mamba_num_heads // groups, axis=1)
        dt = np.logaddexp(0.0, dt + w["dt_bias"])
        h = self.states["ssm"][layer]  # [heads, head_dim, state_dim]
        h *= np.exp(dt * -np.exp(w["A_log"]))[:, None, None]
        h += (dt[:, None] * x_heads)[:, :, None] * B[:, None, :]
        y = (h @ C[:, :, None])[:, :, 0] + w["D"][:, None] * x_heads

        gated = (y.reshape(-1) * silu(gate)).reshape(groups, -1)
        return w["out_proj"] @ (rms_norm_rows(gated, c.norm_eps).reshape(-1) * w["norm"])

    def _gated_delta_net(self, w: dict[str, Array], layer: int, x: Array) -> Array:
        c = self.config
        keys, heads = c.delta_num_key_heads * c.delta_key_dim, c.delta_num_value_heads
        values = heads * c.delta_value_dim
        before_b = 2 * (keys + values)
        gate, raw, b, a = parts(w["in_proj"] @ x, values, before_b, before_b + heads)
        q, k, v = parts(silu(self._convolve("gdn_conv", layer, raw, w["conv_weight"])), keys, 2 * keys)
        q, k = (unit_rows(part.reshape(c.delta_num_key_heads, c.delta_key_dim)) for part in (q, k))
        q = q / np.sqrt(c.delta_key_dim)
        v = v.reshape(heads, c.delta_value_dim)
        decay = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0.0, a + w["dt_bias"]))
        beta = 1.0 / (1.0 + np.exp(-b))
        q, k = (part.repeat(heads // c.delta_num_key_heads, axis=0) for part in (q, k))
        S = self.states["delta"][layer]  # [heads, key_dim, value_dim]
        S *= decay[:, None, None]
        S += k[:, :, None] * (beta[:, None] * (v - (k[:, None, :] @ S)[:, 0]))[:, None, :]
        o = rms_norm_rows((q[:, None, :] @ S)[:, 0], c.norm_eps) * w["norm"]
        return w["out_proj"] @ (o.reshape(-1) * silu(gate))

    def _short_conv(self, w: dict[str, Array], layer: int, x: Array) -> Array:
        before, behind, x = (w["in_proj"] @ x).reshape(3, -1)
        return w["out_proj"] @ (behind * self._convolve("short_conv", layer, before * x, w["conv_weight"]))

    def _attention(self, w: dict[str, Array], layer: int, x: Array) -> Array:
        c = self.config
        query = self._rotate((w["q_proj"] @ x).reshape(-1, c.head_dim))
        key = self._rotate((w["k_proj"] @ x).reshape(-1, c.head_dim))
        value = (w["v_proj"] @ x).reshape(-1, c.head_dim)
        self.keys[layer] = np.concatenate([self.keys[layer], key[None]])
        self.values[layer] = np.concatenate([self.values[layer], value[None]])
        # Several heads read the same keys and values: [KV heads, heads of each, tokens].
        keys, values = (rows[layer].swapaxes(0, 1) for rows in (self.keys, self.values))
        query = query.reshape(c.num_kv_heads, -1, c.head_dim)
        scores = query @ keys.swapaxes(1, 2) / math.sqrt(c.head_dim)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return w["o_proj"] @ (weights @ values).reshape(-1)

    def _mlp(self, w: dict[str, Array], layer: int, x: Array) -> Array:
        return w["down_proj"] @ np.maximum(w["up_proj"] @ x, 0.0) ** 2

    def _rotate(self, x: Array) -> Array:
        """Each pair (i, i + head_dim / 2) as a complex number, turned by its angle at this position."""
        half = x.shape[1] // 2
        turned = (x[:, :half] + 1j * x[:, half:]) * turn(self.position, half, self.config.rotary_base)
        return np.concatenate([turned.real, turned.imag], axis=1)


def parts(x: Array, *ends: int) -> Iterator[Array]:
    """What lies before each of the ends, and behind the last."""
    return (x[start:end] for start, end in pairwise([0, *ends, x.size]))


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    """Of one vector."""
    return x / math.sqrt(x @ x / x.size + eps) * weight


def rms_norm_rows(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).sum(axis=1, keepdims=True) / x.shape[1] + eps)


@cache
def turn(position: int, half: int, base: float) -> NDArray[np.complex128]:
    return np.exp(1j * position * base ** (-np.arange(half) / half))


def unit_rows(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(axis=1, keepdims=True) + 1e-6)


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def log_sum_exp(x: Array) -> float:
    return float(x.max() + np.log(np.exp(x - x.max()).sum()))
