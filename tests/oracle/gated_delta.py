"""Layers of the gated delta rule, token by token in float64 numpy, and packed layouts of their rows.

S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q, with q and k normalised and q scaled by Dk ** -0.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mambaslots.inference.kernels.step_rows import ScanRows
from oracle.scan_rows import Cuts, Row
from torch import Tensor

LONGEST = 400
INPUTS = ("q", "k", "v", "g", "beta")


def recurrence(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """o [T, Hv, Dv] and the states before, between and after the tokens, [T + 1, Hv, Dk, Dv].

    q, k [T, Hk, Dk] raw, v [T, Hv, Dv], g and beta [T, Hv], state [Hv, Dk, Dv].
    """
    value_heads, key_dim, value_dim = state.shape
    outputs = np.zeros((len(v), value_heads, value_dim))
    states = np.zeros((len(v) + 1, value_heads, key_dim, value_dim))
    states[0] = state
    for t in range(len(v)):
        for head in range(value_heads):
            key_head = head * k.shape[1] // value_heads
            key = k[t, key_head] / np.sqrt(np.sum(k[t, key_head] ** 2) + 1e-6)
            query = q[t, key_head] / np.sqrt(np.sum(q[t, key_head] ** 2) + 1e-6) / np.sqrt(key_dim)
            s = np.exp(g[t, head]) * states[t, head]
            s = s + np.outer(key, beta[t, head] * (v[t, head] - key @ s))
            outputs[t, head] = query @ s
            states[t + 1, head] = s
    return outputs, states


@dataclass(frozen=True)
class Layer:
    """One layer's sizes. A sequence's inputs follow from its seed alone."""

    Hk: int = 2
    Hv: int = 4
    Dk: int = 8
    Dv: int = 12
    dtype: torch.dtype = torch.float32
    decay: float = 0.5
    """The mean of -g."""
    jumps: bool = True
    """Whether single tokens have a hundred times as much: their sums leave float32 few bits."""
    doubled: bool = False
    """Whether beta goes up to 2, which turns eigenvalues of a state's update negative."""

    def tokens(self, seed: int) -> dict[str, Tensor]:
        """The inputs of the sequence's first tokens: q, k, v in `dtype`, g and beta in float32 or wider."""
        random = np.random.default_rng(seed + 1)
        # Neighbouring keys resemble each other, as behind a convolution; otherwise all are almost orthogonal.
        k = random.normal(size=(LONGEST, self.Hk, self.Dk)) + random.normal(size=(self.Hk, self.Dk))
        g = -self.decay * random.exponential(size=(LONGEST, self.Hv)) ** 3 / 6
        g[(random.random(g.shape) < 0.02) & self.jumps] *= 100
        values = {
            "q": random.normal(size=(LONGEST, self.Hk, self.Dk)),
            "k": k,
            "v": random.normal(size=(LONGEST, self.Hv, self.Dv)),
        }
        gates = {"g": g, "beta": random.random((LONGEST, self.Hv)) * (2 if self.doubled else 1)}
        gate_dtype = torch.promote_types(self.dtype, torch.float32)
        return {name: torch.from_numpy(value).to(self.dtype) for name, value in values.items()} | {
            name: torch.from_numpy(value).to(gate_dtype) for name, value in gates.items()
        }

    def pool(self, slots: int, dtype: torch.dtype | None = None, seed: int = 3) -> Tensor:
        dtype = dtype or torch.promote_types(self.dtype, torch.float32)
        states = np.random.default_rng(1000 + seed).normal(size=(slots, self.Hv, self.Dk, self.Dv))
        return torch.from_numpy(states).to(dtype)

    def run(self, inputs: Mapping[str, Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """`recurrence` of torch tensors, from `initial` [Hv, Dk, Dv] or zeros."""
        state = np.zeros((self.Hv, self.Dk, self.Dv))
        if initial is not None:
            state = initial.double().numpy()
        o, states = recurrence(*(inputs[name].double().numpy() for name in INPUTS), state)
        return torch.from_numpy(o), torch.from_numpy(states)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest expected number; NaN if `found` has one, 0 for nothing."""
    if expected.numel() == 0:
        return 0.0
    difference = (found.double().cpu() - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-3))


class Batch:
    """`rows` packed for a scan, on the absolute grid, with padding (rows, chunks, tokens) of NaN behind."""

    def __init__(
        self, layer: Layer, rows: Sequence[Row], chunk_size: int, padding: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        self.layer, self.rows, self.chunk_size = layer, rows, chunk_size
        padding_rows, padding_chunks, padding_tokens = padding
        cut = Cuts.of(rows, chunk_size)
        cuts, seq_idx, starts, stored = cut.ends, cut.row_of_chunk, cut.row_starts, cut.destination_of_chunk
        self.num_tokens = cuts[-1]

        def index(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype)

        self.indices = {
            "sources": index([row.source for row in rows] + [-1] * padding_rows),
            "destinations": index([row.destination for row in rows] + [-1] * padding_rows),
            "cu_chunk_seqlens": index(cuts + [cuts[-1]] * padding_chunks, torch.int32),
            "seq_idx": index(seq_idx + [0] * padding_chunks, torch.int32),
            "row_chunk_starts": index(starts + [starts[-1]] * padding_rows, torch.int32),
            "chunk_destinations": index(stored + [-1] * padding_chunks),
        }
        parts = [layer.tokens(row.seed) for row in rows] or [layer.tokens(0)]
        self.inputs = {}
        for name in INPUTS:
            own = [
                part[name][row.start : row.start + row.length] for part, row in zip(parts, rows, strict=False)
            ]
            behind = parts[0][name].new_full((padding_tokens, *parts[0][name].shape[1:]), torch.nan)
            self.inputs[name] = torch.cat([*own, behind])

    def arguments(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Everything but the states. As in a model, q, k and v are parts of one tensor."""
        wide = [self.inputs[name].flatten(1) for name in ("q", "k", "v")]
        parts = torch.cat(wide, dim=1).to(device).split([part.shape[1] for part in wide], dim=1)
        views = {
            name: part.unflatten(1, self.inputs[name].shape[1:])
            for name, part in zip(("q", "k", "v"), parts, strict=True)
        }
        gates = {name: self.inputs[name].to(device) for name in ("g", "beta")}
        moved = {name: tensor.to(device) for name, tensor in self.indices.items()}
        return views | gates | {"rows": ScanRows(**moved, chunk_size=self.chunk_size)}

    def scan(self, gated_delta_rule_scan: Any, pool: Tensor) -> Tensor:
        """o of this batch on the device of `pool`, which is written."""
        return gated_delta_rule_scan(states=pool, **self.arguments(pool.device)).cpu()

    def check(
        self, before: Tensor, pool: Tensor, o: Tensor, tolerance: float, state_tolerance: float | None = None
    ) -> None:
        """Assert that `o` and what was written to `pool` are the recurrence's, and that nothing else was."""
        before, pool = before.cpu(), pool.cpu()
        errors, state_errors, written, token = [], [], set(), 0
        for row in self.rows:
            part = slice(token, token + row.length)
            inputs = {name: self.inputs[name][part] for name in INPUTS}
            expected, states = self.layer.run(inputs, None if row.source == -1 else before[row.source])
            errors.append(error(o[part], expected))
            ends = [*row.checkpoints.items(), (row.start + row.length, row.destination)]
            for position, slot in ends:
                if slot != -1:
                    state_errors.append(error(pool[slot], states[position - row.start]))
                    written.add(slot)
            token += row.length
        untouched = [slot for slot in range(pool.shape[0]) if slot not in written]
        torch.testing.assert_close(pool[untouched], before[untouched], rtol=0, atol=0, equal_nan=True)
        assert all(found <= tolerance for found in errors), errors  # false for NaN
        assert all(found <= (state_tolerance or tolerance) for found in state_errors), state_errors


def decode_inputs(
    layer: Layer, rows: int, tokens: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The inputs of `rows` sequences, [rows, tokens, ...]; q, k and v are parts of one tensor."""
    made = [layer.tokens(seed) for seed in range(rows)]
    inputs = {name: torch.stack([part[name][:tokens] for part in made]) for name in INPUTS}
    wide = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], dim=2).to(device)
    parts = wide.split([inputs[name][0, 0].numel() for name in ("q", "k", "v")], dim=2)
    for name, part in zip(("q", "k", "v"), parts, strict=True):
        inputs[name] = part.unflatten(2, inputs[name].shape[2:])
    return {name: tensor.to(device) for name, tensor in inputs.items()}
