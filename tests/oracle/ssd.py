"""SSD layers by the token-by-token recurrence in float64, and packed layouts of their rows for the kernels.

h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t],  y[t] = C[t] h[t] + D x[t]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from mambaslots.inference.kernels.step_rows import ScanRows
from oracle.scan_rows import Cuts, Row
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where kernels run: in the interpreter, or on a GPU."""


def kernel_device(name: str) -> torch.device:
    """`name` as a device, or a skipped test: kernels are interpreted only where there is no GPU."""
    if (name == "cuda") != torch.cuda.is_available():
        pytest.skip("no GPU here" if name == "cuda" else "kernels run on the GPU here")
    return torch.device(name)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; NaN if `out` has one, 0 where both are empty or zero."""
    difference = (out.double().cpu() - expected.double().cpu()).norm()
    return float(difference / expected.double().cpu().norm()) if difference != 0 else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit: NaN equals itself, and 0 is not -0."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


@dataclass(frozen=True)
class Layer:
    """One Mamba-2 layer's sizes and parameters. A sequence's inputs follow from its seed alone."""

    H: int = 4
    P: int = 8
    G: int = 2
    N: int = 12
    dtype: torch.dtype = torch.float32

    @cached_property
    def A(self) -> Tensor:  # noqa: N802
        return -torch.logspace(-2, 0.5, self.H, dtype=torch.float64).float()

    @cached_property
    def D(self) -> Tensor:  # noqa: N802
        return randn(self.H, seed=1).float()

    def tokens(self, seed: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [length, H, P], dt [length, H] float32, B and C [length, G, N] of the sequence's start."""
        longest = 600
        assert length <= longest
        x, dt, B, C = (
            randn(longest, *shape, seed=10 * seed + 2 + i)[:length]
            for i, shape in enumerate([(self.H, self.P), (self.H,), (self.G, self.N), (self.G, self.N)])
        )
        return x.to(self.dtype), F.softplus(dt - 2).float(), B.to(self.dtype), C.to(self.dtype)

    def pool(self, slots: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
        return randn(slots, self.H, self.P, self.N, seed=seed).to(dtype)

    def run(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """y [T, H, P] and the states before, between and after the tokens [T + 1, H, P, N], in float64."""
        state = torch.zeros(self.H, self.P, self.N, dtype=torch.float64)
        if initial is not None:
            state = initial.double()
        A, D = self.A.double(), self.D.double()
        group = torch.arange(self.H) // (self.H // self.G)
        outputs, states = [], [state]
        for x_t, dt_t, B_t, C_t in zip(x.double(), dt.double(), B.double(), C.double(), strict=True):
            update = (dt_t[:, None] * x_t)[:, :, None] * B_t[group][:, None, :]
            state = (dt_t * A).exp()[:, None, None] * state + update
            outputs.append((state * C_t[group][:, None, :]).sum(-1) + D[:, None] * x_t)
            states.append(state)
        return torch.stack(outputs) if outputs else x.double(), torch.stack(states)


class Batch:
    """`rows` packed for the kernels, on the absolute grid, with padding behind.

    Args:
        layer, rows, chunk_size: what is computed.
        padding: how many rows, chunks and tokens of padding follow.
    """

    def __init__(
        self, layer: Layer, rows: Sequence[Row], chunk_size: int, padding: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        self.layer, self.rows, self.chunk_size = layer, rows, chunk_size
        padding_rows, padding_chunks, padding_tokens = padding
        cut = Cuts.of(rows, chunk_size)
        cuts, seq_idx = cut.ends, cut.row_of_chunk
        row_chunk_starts, chunk_destinations = cut.row_starts, cut.destination_of_chunk
        self.tokens = cuts[-1]
        self.chunks = len(seq_idx)
        self.cuts = torch.tensor(cuts + [cuts[-1]] * padding_chunks, dtype=torch.int32)
        self.seq_idx = torch.tensor(seq_idx + [0] * padding_chunks, dtype=torch.int32)
        self.row_chunk_starts = torch.tensor(
            row_chunk_starts + [len(seq_idx)] * padding_rows, dtype=torch.int32
        )
        self.chunk_destinations = torch.tensor(chunk_destinations + [-1] * padding_chunks, dtype=torch.int64)
        none = [-1] * padding_rows
        self.sources = torch.tensor([row.source for row in rows] + none, dtype=torch.int64)
        self.destinations = torch.tensor([row.destination for row in rows] + none, dtype=torch.int64)

        parts = [layer.tokens(row.seed, row.start + row.length) for row in rows]
        poison = [tensor.new_full((padding_tokens, *tensor.shape[1:]), torch.nan) for tensor in parts[0]]
        self.x, self.dt, self.B, self.C = (
            torch.cat([*(part[row.start :] for part, row in zip(tensors, rows, strict=True)), padded])
            for *tensors, padded in zip(*parts, poison, strict=True)
        )

    def scan(self, ssd_chunk_scan, pool: Tensor, **options) -> Tensor:
        """`ssd_chunk_scan` of this batch on the device of `pool`, y on the CPU.

        As in a model, x, B and C are parts of one tensor.
        """
        parts = [self.x.flatten(1), self.B.flatten(1), self.C.flatten(1)]
        x, B, C = torch.cat(parts, dim=1).to(pool.device).split([part.shape[1] for part in parts], dim=1)

        def at(tensor: Tensor) -> Tensor:
            return tensor.to(pool.device)

        return ssd_chunk_scan(
            x.unflatten(1, self.x.shape[1:]), at(self.dt), at(self.layer.A), B.unflatten(1, self.B.shape[1:]),
            C.unflatten(1, self.C.shape[1:]), at(self.layer.D), pool,
            self.scan_rows(pool.device), **options,
        ).cpu()  # fmt: skip

    def scan_rows(self, device: torch.device | str) -> ScanRows:
        return ScanRows(
            self.sources.to(device), self.destinations.to(device), self.chunk_size, self.cuts.to(device),
            self.seq_idx.to(device), self.row_chunk_starts.to(device), self.chunk_destinations.to(device),
        )  # fmt: skip

    def check(
        self, pool_before: Tensor, pool: Tensor, y: Tensor, tolerance: float = 1e-5, state_tolerance=None
    ) -> float:
        """Assert that `y` and what was written to `pool` are the recurrence's, and that nothing else was.

        Returns the largest relative error of a row's y, or of a state.
        """
        pool_before, pool = pool_before.cpu(), pool.cpu()
        errors, state_errors = [], []
        written = set()
        token = 0
        for row in self.rows:
            part = slice(token, token + row.length)
            initial = None if row.source == -1 else pool_before[row.source]
            expected, states = self.layer.run(
                self.x[part], self.dt[part], self.B[part], self.C[part], initial
            )
            errors.append(relative_error(y[part], expected))
            ends = {row.start + row.length: row.destination}
            for position, slot in [*row.checkpoints.items(), *ends.items()]:
                if slot != -1:
                    state_errors.append(relative_error(pool[slot], states[position - row.start]))
                    written.add(slot)
            token += row.length
        untouched = [slot for slot in range(pool.shape[0]) if slot not in written]
        assert same_bits(pool[untouched], pool_before[untouched])
        assert all(error <= tolerance for error in errors), errors  # false for NaN
        assert all(error <= (state_tolerance or tolerance) for error in state_errors), state_errors
        return max([*errors, *state_errors])


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` gives NaN, so that what a kernel should have written and did not shows."""
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield
