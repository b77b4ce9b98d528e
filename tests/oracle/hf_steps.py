"""A served model's steps, driven by hand, beside transformers' logits of the whole text."""

from collections.abc import Callable, Sequence

import torch
from mambaslots.hf.served_model import ServedModel
from oracle.hf_models import relative_error
from oracle.steps import Row, build_step, make_caches
from torch import Tensor

BLOCK = 8
CHECKPOINT = 64
"""A position on the grid of every architecture, inside the second part of the long text's prompt."""

LONG, SHORT = 77, 21
"""Tokens of the two texts that `step_errors` computes."""

Texts = tuple[Sequence[int], Sequence[int]]


class Steps:
    """Steps of one model over caches that are full of NaN."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.spec = model, model.state_spec()
        self.pool, self.kv_cache = make_caches(self.spec, 8, 48, BLOCK, fill=float("nan"))

    def run(self, *rows: Row) -> list[Tensor]:
        """One step; the logits of each row's tokens."""
        logits = self.model(build_step(self.spec, self.pool, self.kv_cache, BLOCK, rows))
        return list(logits.split([len(row.tokens) for row in rows]))


def step_errors(
    model: ServedModel, texts: Texts, expected: tuple[Tensor, Tensor]
) -> tuple[dict[str, float], float]:
    """How far a served model's logits are from `expected`, by the way in which the steps were cut.

    Returns: the relative errors; and that of a text that goes on from zeros in the place of its state, which
        must not be small.
    """
    steps = Steps(model)
    (a, b), (logits_a, logits_b) = texts, expected
    blocks_a, blocks_b, blocks_c = (list(range(first, first + 10)) for first in (0, 10, 20))

    def part(text: Sequence[int], blocks: Sequence[int], start: int, stop: int, slot: int) -> Row:
        source = slot if start else -1
        return Row(text[start:stop], start, source, slot, blocks, decode=stop - start == 1, logits="all")

    (whole,) = steps.run(part(a, blocks_a, 0, len(a), 0))

    first_a, first_b = steps.run(part(a, blocks_a, 0, 19, 1), part(b, blocks_b, 0, 11, 2))
    long_part = Row(a[19:70], 19, 1, 1, blocks_a, checkpoints={CHECKPOINT: 5}, logits="all")
    decoded_b, second_a = steps.run(part(b, blocks_b, 11, 12, 2), long_part)
    decodes_a, decodes_b = [], [decoded_b]
    for offset in range(len(a) - 70):
        row_a = part(a, blocks_a, 70 + offset, 71 + offset, 1)
        row_b = part(b, blocks_b, 12 + offset, 13 + offset, 2)
        decoded_a, decoded_b = steps.run(row_a, row_b)
        decodes_a.append(decoded_a)
        decodes_b.append(decoded_b)

    shared = [*blocks_a[: CHECKPOINT // BLOCK], *blocks_c]
    rest = Row(a[CHECKPOINT:], CHECKPOINT, 5, 3, shared, logits="all")
    (resumed,) = steps.run(rest)
    (forgotten,) = steps.run(Row(a[CHECKPOINT:], CHECKPOINT, -1, 4, shared, logits="all"))

    stop_b = 12 + len(decodes_a)
    errors = {
        "whole": relative_error(whole, logits_a),
        "chunked": relative_error(torch.cat([first_a, second_a]), logits_a[:70]),
        "batched": relative_error(first_b, logits_b[:11]),
        "decoded": max(
            relative_error(torch.cat(decodes_a), logits_a[70:]),
            relative_error(torch.cat(decodes_b), logits_b[11:stop_b]),
        ),
        "resumed": relative_error(resumed, logits_a[CHECKPOINT:]),
    }
    return errors, relative_error(forgotten, logits_a[CHECKPOINT:])


def texts(vocabulary: int, seed: int = 5) -> Texts:
    """Two random texts, of `LONG` and `SHORT` tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[[int], list[int]] = lambda n: torch.randint(vocabulary, (n,), generator=generator).tolist()  # noqa: E731
    return draw(LONG), draw(SHORT)
