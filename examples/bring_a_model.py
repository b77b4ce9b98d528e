"""Bring a model: a moving average and paged attention in plain torch, served with and without the cache.

The class below is all that mambaslots needs of a model. Its recurrence is an exponential moving average of
token vectors, h = decay * h + (1 - decay) * x; its attention reads the paged KV cache. The script checks the
model with `mambaslots.testing.check_model`, then serves a prompt, the same prompt again, an extension and two
forks of it: uncached, cached, and cached with drafts.

    python examples/bring_a_model.py --dtype float64

The last line says whether all answers are identical; the exit code is 1 if they are not.
"""

import argparse
import sys

import mambaslots as ms
import torch
from torch import Tensor

VOCABULARY, DIM, CHUNK, BLOCK = 64, 16, 8, 16


class MovingAverageLM:
    """One recurrent layer, one attention layer, one KV head."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        shapes = (VOCABULARY, DIM), (3, DIM, DIM), (DIM, VOCABULARY)
        self.embedding, self.projections, self.head = (
            torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
        )
        self.decay = torch.linspace(0.5, 0.99, DIM, dtype=torch.float64).to(dtype)

    def state_spec(self) -> ms.HybridStateSpec:
        dtype = self.head.dtype
        return ms.HybridStateSpec(
            states=[ms.StateTensor("average", num_layers=1, shape=(DIM,), dtype=dtype, grid=CHUNK)],
            num_attention_layers=1, num_kv_heads=1, head_dim=DIM, kv_dtype=dtype,
            vocab_size=VOCABULARY, device=torch.device("cpu"),
        )  # fmt: skip

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        # The row of each token: decode rows first; padding tokens get the index behind the last row.
        decoded, prefilled = torch.arange(inputs.num_decode_tokens), inputs.chunks.token_rows
        prefilled = torch.where(prefilled < 0, inputs.shape.rows, inputs.num_decodes + prefilled)
        rows = torch.cat([decoded // inputs.shape.decode_tokens, prefilled])
        x = self.embedding[inputs.token_ids]
        x = x + self.average(x, rows, inputs)
        x = x + self.attend(x, rows, inputs)
        return x[inputs.logit_tokens] @ self.head

    def average(self, x: Tensor, rows: Tensor, inputs: ms.StepInputs) -> Tensor:
        states, sources = inputs.state_pool["average"][0], inputs.state_sources
        state = states[sources.clamp(min=0)].masked_fill((sources < 0)[:, None], 0.0)  # -1 means zeros
        state = [*state, torch.zeros_like(x[0])]
        after = []
        for token, row in enumerate(rows.tolist()):
            state[row] = self.decay * state[row] + (1 - self.decay) * x[token]
            after.append(state[row])
        # States go where the step says: after each decode token, each prefill row, and chunks of it.
        first, chunks = inputs.num_decode_tokens, inputs.chunks
        ends = torch.cat([chunks.query_start_loc[1:], chunks.cu_chunk_seqlens[1:].long()]) + first - 1
        tokens = torch.cat([torch.arange(first), ends])
        destinations = torch.cat([inputs.state_destinations, chunks.destinations])
        keep = destinations >= 0  # -1 means nowhere
        states[destinations[keep]] = torch.stack(after)[tokens[keep]]
        return torch.stack(after)

    def attend(self, x: Tensor, rows: Tensor, inputs: ms.StepInputs) -> Tensor:
        cache, keep = inputs.kv_cache[0], inputs.kv_write_positions >= 0
        query, *new = x @ self.projections
        for memory, values in zip(cache, new, strict=True):  # keys, then values
            places = inputs.kv_write_positions[keep]
            memory.flatten(0, 1)[places, 0] = values[inputs.kv_write_tokens[keep]]
        table = torch.cat([inputs.block_table, torch.zeros_like(inputs.block_table[:1])])[rows]
        seen = torch.arange(table.shape[1] * cache.shape[2]) <= inputs.positions[:, None]
        keys, values = (  # of each token's row, [tokens, places, DIM]; what is not seen may be NaN
            memory[table].flatten(1, 3).masked_fill(~seen[..., None], 0.0) for memory in cache
        )
        scores = (keys @ query[..., None])[..., 0] / DIM
        return (scores.masked_fill(~seen, -torch.inf).softmax(1)[:, None] @ values)[:, 0]


def serve(model: MovingAverageLM, caching: bool, drafts: int = 0) -> list[ms.RequestResult]:
    """A prompt, then the same again, an extension and two forks of it."""
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK, max_requests=4, max_tokens_per_step=128, max_sequence_length=256,
        num_kv_blocks=64,
        num_mamba_slots=16 if caching else None, enable_prefix_caching=caching, num_speculative_tokens=drafts,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(model, config)
    prompt = [(7 * i + i // 5) % VOCABULARY for i in range(70)]
    forks = [prompt[:40] + prompt[first : first + 20] for first in (0, 9)]
    prompts = [prompt, prompt, prompt + prompt[:20], *forks]
    params = ms.SamplingParams(max_tokens=24, return_log_probs=True)
    return [engine.generate([each], params)[0] for each in prompts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="(float64)")
    parser.add_argument("--drafts", type=int, default=3, help="most drafts a request and step (3)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # these shapes are small
    model = MovingAverageLM(getattr(torch, args.dtype))
    print(ms.testing.check_model(model, num_speculative_tokens=args.drafts))
    plain = serve(model, caching=False)
    same = True
    for name, results in (
        ("cached", serve(model, caching=True)),
        ("cached, with drafts", serve(model, caching=True, drafts=args.drafts)),
    ):
        resumed = [f"{result.num_resumed_tokens} of {result.num_prompt_tokens}" for result in results]
        equal = [result.tokens for result in results] == [result.tokens for result in plain]
        same &= equal
        print(f"{name}: resumed {', '.join(resumed)} tokens; answers {'equal' if equal else 'differ'}")
    print(f"answers identical: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
