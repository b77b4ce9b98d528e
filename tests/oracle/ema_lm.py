"""The smallest hybrid model there is, in pieces that a test can replace by wrong ones.

A recurrent layer (a short convolution and an exponential moving average), or two, then one attention layer.
"""

import math

import mambaslots as ms
import torch
from oracle.state_tensors import conv_and_ssm
from torch import Tensor

VOCABULARY, DIM, HEADS, TAPS = 17, 8, 2, 3


class EmaLM:
    """Right, in plain torch, and slow."""

    layers = 1
    dtype = torch.float64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        self.embedding, self.head = draw(VOCABULARY, DIM), draw(DIM, VOCABULARY)
        self.taps = [draw(TAPS, DIM) / 2 for _ in range(self.layers)]
        self.inward = [draw(DIM, DIM) / 3 for _ in range(self.layers)]
        self.query, self.key, self.value = (draw(DIM, DIM) / 2 for _ in range(3))
        self.decay = torch.linspace(0.5, 0.98, DIM, dtype=self.dtype)

    def state_spec(self) -> ms.HybridStateSpec:
        return ms.HybridStateSpec(
            states=conv_and_ssm(self.layers, (TAPS - 1, DIM), (DIM,), self.dtype, self.dtype),
            num_attention_layers=1, num_kv_heads=HEADS, head_dim=DIM // HEADS, kv_dtype=self.dtype,
            vocab_size=VOCABULARY, device=torch.device("cpu"),
        )  # fmt: skip

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        x = self.embedding[inputs.token_ids]
        for layer in range(self.layers):
            x = x + self.recur(layer, x, inputs)
        x = x + self.attend(x, inputs)
        return self.logits(x, inputs)

    def logits(self, x: Tensor, inputs: ms.StepInputs) -> Tensor:
        return x[inputs.logit_tokens] @ self.head

    # ---- which token is whose

    def rows(self, inputs: ms.StepInputs) -> Tensor:
        """[T]: the row of each token; that behind the last row for padding tokens."""
        decoded = torch.arange(inputs.num_decode_tokens) // inputs.shape.decode_tokens
        prefilled = inputs.chunks.token_rows
        return torch.cat(
            [decoded, torch.where(prefilled < 0, inputs.shape.rows, inputs.num_decodes + prefilled)]
        )

    def ends(self, inputs: ms.StepInputs) -> tuple[Tensor, Tensor]:
        """Tokens behind which the state is stored, and where."""
        last = inputs.num_decode_tokens + inputs.chunks.query_start_loc[1:] - 1
        tokens = torch.cat([torch.arange(inputs.num_decode_tokens), last])
        return tokens, inputs.state_destinations

    def chunk_ends(self, inputs: ms.StepInputs) -> tuple[Tensor, Tensor]:
        last = inputs.num_decode_tokens + inputs.chunks.cu_chunk_seqlens[1:].long() - 1
        return last, inputs.chunks.destinations

    def window_ends(self, inputs: ms.StepInputs) -> tuple[Tensor, Tensor]:
        checkpoints = inputs.checkpoints
        return inputs.num_decode_tokens + checkpoints.token_ends - 1, checkpoints.destinations

    # ---- the recurrence

    def read(self, states: Tensor, inputs: ms.StepInputs) -> Tensor:
        """[rows, ...]: what each row begins with."""
        none = (inputs.state_sources < 0).view(-1, *[1] * (states.dim() - 1))
        return states[inputs.state_sources.clamp(min=0)].masked_fill(none, 0.0)

    def write(self, states: Tensor, values: Tensor, ends: tuple[Tensor, Tensor]) -> None:
        tokens, destinations = ends
        keep = destinations >= 0
        states[destinations[keep]] = values[tokens[keep]]

    def recur(self, layer: int, x: Tensor, inputs: ms.StepInputs) -> Tensor:
        pool = inputs.state_pool
        windows, averages = pool["conv"][layer], pool["ssm"][layer]
        out, after_windows, after = self.scan(
            layer, x, self.read(windows, inputs), self.read(averages, inputs), inputs
        )
        self.write(windows, after_windows, self.ends(inputs))
        self.write(windows, after_windows, self.window_ends(inputs))
        self.write(averages, after, self.ends(inputs))
        self.write(averages, after, self.chunk_ends(inputs))
        return out

    def scan(
        self, layer: int, x: Tensor, windows: Tensor, averages: Tensor, inputs: ms.StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [T, DIM], and after each token the window [T, TAPS - 1, DIM] and the average [T, DIM]."""
        rows = self.rows(inputs)
        windows = torch.cat([windows, windows.new_zeros(1, TAPS - 1, DIM)])
        averages = torch.cat([averages, averages.new_zeros(1, DIM)])
        after_windows, after = x.new_empty(len(x), TAPS - 1, DIM), torch.empty_like(x)
        for row in rows.unique().tolist():  # apart, so that no row meets what another one computes
            own = rows == row
            seen = torch.cat([windows[row], x[own]]).unfold(0, TAPS, 1)  # [tokens, DIM, TAPS]
            after_windows[own] = seen[..., 1:].mT
            mixed = (seen.mT * self.taps[layer]).sum(1) @ self.inward[layer]
            # The sum over tokens s <= t of (1 - decay) * decay ** (t - s) * mixed[s], and the start's part.
            tokens = torch.arange(len(mixed))
            before = (tokens[:, None] - tokens)[..., None]
            weights = self.decay ** before.clamp(min=0) * (before >= 0)
            average = torch.einsum("tsd,sd->td", weights, (1 - self.decay) * mixed)
            after[own] = average + self.decay ** (tokens + 1)[:, None] * averages[row]
        return after.tanh(), after_windows, after

    # ---- attention

    def attend(self, x: Tensor, inputs: ms.StepInputs) -> Tensor:
        heads = (HEADS, DIM // HEADS)
        turn = (inputs.positions[:, None] * 0.3).cos().to(x.dtype)
        query, key, value = (
            torch.unflatten(part, 1, heads)
            for part in ((x @ self.query) * turn, (x @ self.key) * turn, x @ self.value)
        )
        self.store(inputs.kv_cache[0], key, value, inputs)
        return self.look(query, inputs.kv_cache[0], inputs).flatten(1)

    def store(self, cache: Tensor, key: Tensor, value: Tensor, inputs: ms.StepInputs) -> None:
        keep = inputs.kv_write_positions >= 0
        tokens, places = inputs.kv_write_tokens[keep], inputs.kv_write_positions[keep]
        cache[0].flatten(0, 1)[places] = key[tokens]
        cache[1].flatten(0, 1)[places] = value[tokens]

    def seen(self, inputs: ms.StepInputs, places: int) -> Tensor:
        """[T, places]: which places of its row's sequence each token attends to."""
        return torch.arange(places) <= inputs.positions[:, None]

    def table(self, inputs: ms.StepInputs) -> Tensor:
        """[T, blocks]: the blocks of each token's row."""
        padding = inputs.block_table.new_zeros(1, inputs.block_table.shape[1])
        return torch.cat([inputs.block_table, padding])[self.rows(inputs)]

    def look(self, query: Tensor, cache: Tensor, inputs: ms.StepInputs) -> Tensor:
        keys, values = (part[self.table(inputs)].flatten(1, 2) for part in cache)
        seen = self.seen(inputs, keys.shape[1])
        scores = torch.einsum("thd,tphd->thp", query, keys) / math.sqrt(DIM // HEADS)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        values = self.masked(values, seen)
        return torch.einsum("thp,tphd->thd", scores.softmax(-1), values)

    def masked(self, values: Tensor, seen: Tensor) -> Tensor:
        return values.masked_fill(~seen[:, :, None, None], 0.0)
