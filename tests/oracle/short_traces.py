"""Traces of a few short requests over few tokens, so that prefixes meet often."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from mambaslots.replay.setting import ModelShape
from mambaslots.replay.trace import Trace, TraceRequest

GIGABYTE = 1 << 30
BLOCK = 2

SMALL = ModelShape(
    name="small",
    state_bytes=4 * GIGABYTE,
    durable_state_bytes=4 * GIGABYTE,
    kv_bytes_per_token=GIGABYTE,
    grid_tokens=BLOCK,
    hidden_size=8,
    num_recurrent_layers=2,
    num_attention_layers=1,
    num_mlp_layers=1,
    state_size=4,
)
"""A token of KV takes a gigabyte, a state four: budgets in tests read as counts."""


def trace(
    requests: Sequence[tuple[Sequence[int], Sequence[int]]], *, gap_s: float = 1.0, sessions: int = 0
) -> Trace:
    """A trace of prompts and answers, `gap_s` apart; requests take turns in `sessions`, or have one each."""
    return Trace(
        "small",
        [
            TraceRequest(
                place * gap_s,
                place % sessions if sessions else place,
                np.array(prompt, dtype=np.int32),
                np.array(answer, dtype=np.int32),
            )
            for place, (prompt, answer) in enumerate(requests)
        ],
    )


def request_lists(
    max_requests: int = 8, max_prompt: int = 9
) -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    """Prompts and answers of tokens 0 and 1; a third of the prompts continue an earlier request."""

    @st.composite
    def draw_requests(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
        token = st.integers(0, 1)
        requests: list[tuple[list[int], list[int]]] = []
        for _ in range(draw(st.integers(1, max_requests))):
            prompt = draw(st.lists(token, min_size=1, max_size=max_prompt))
            if requests and draw(st.integers(0, 2)) == 0:
                before = draw(st.sampled_from(requests))
                prompt = (before[0] + before[1] + prompt[:3])[: 2 * max_prompt]
            requests.append((prompt, draw(st.lists(token, min_size=1, max_size=6))))
        return requests

    return draw_requests()
