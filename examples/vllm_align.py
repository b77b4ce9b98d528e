"""Drive vLLM's align mode over a few requests with drafts, and check each state against a plain recurrence.

The model is one layer with a convolution and a recurrence, small enough to be read. Requests prefill their
prompts in steps, then verify drafts, some of which are wrong. A last request begins with the first
request's text and starts from a state that the first request left on a block boundary. Every state that a
forward reads, and every state kept on a boundary, must equal the one of a recurrence that computes all
tokens in order.

    python examples/vllm_align.py --requests 4 --drafts 3 --block 8

The last line says whether all states are right; the exit code is 1 if one is not.
"""

import argparse
import random
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from mambaslots.vllm import (
    MambaBuffers,
    MambaCacheConfig,
    cleanup_mamba_state_idx,
    postprocess_mamba_align_gpu,
    preprocess_mamba,
    stage_postprocess_inputs_to_gpu,
)

HISTORY = 3
"""Inputs before the newest one that the convolution reads."""
STATE_TYPES = ("conv", "ssm")
WEIGHTS = torch.linspace(-1, 1, 4 * (HISTORY + 1), dtype=torch.float64).reshape(4, HISTORY + 1)


def next_state(state: torch.Tensor, inputs: list[float]) -> torch.Tensor:
    """The SSM state [4] after one more token; `inputs` are that token and the HISTORY before it."""
    return 0.9 * state + torch.sin(WEIGHTS @ torch.tensor(inputs, dtype=torch.float64))


def plain_states(text: list[float]) -> list[tuple[torch.Tensor, list[float]]]:
    """(SSM state, the last HISTORY inputs) after each number of tokens, computed in order from zeros."""
    padded = [0.0] * HISTORY + text
    states = [torch.zeros(4, dtype=torch.float64)]
    for place in range(len(text)):
        states.append(next_state(states[-1], padded[place : place + HISTORY + 1]))
    return [(state, padded[place : place + HISTORY]) for place, state in enumerate(states)]


@dataclass
class Request:
    """A request as this host keeps it; vLLM's functions read `num_computed_tokens` only."""

    text: list[float]
    """The prompt and the answer, which the model is going to give."""
    num_prompt_tokens: int
    slots: list[int]
    """The slot of each column."""
    num_computed_tokens: int = 0
    num_accepted: int = 1
    boundaries: list[int] = field(default_factory=list)
    """Token counts on block boundaries whose states are kept."""


class Host:
    """The requests, the states of one layer, and the calls of a step."""

    def __init__(self, requests: dict[str, Request], num_slots: int, config: MambaCacheConfig) -> None:
        self.requests, self.config = requests, config
        window = HISTORY + config.num_speculative_tokens
        self.conv = torch.full((num_slots, 1, window), torch.nan, dtype=torch.float64)
        self.ssm = torch.full((num_slots, 4), torch.nan, dtype=torch.float64)
        self.layers = {"layer": SimpleNamespace(kv_cache=[self.conv, self.ssm])}
        self.buffers = MambaBuffers.create(config, torch.device("cpu"))
        self.columns: dict[str, int] = {}
        self.plain = {name: plain_states(request.text) for name, request in requests.items()}
        self.num_reads = self.num_wrong = 0

    def step(self, names: list[str], draw: random.Random) -> None:
        """One step of these requests, in this order."""
        drafts = {name: self.drafts_of(self.requests[name], draw) for name in names}
        scheduled = {name: self.tokens_of(self.requests[name], drafts[name], draw) for name in names}
        output = SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens={name: len(tokens) for name, tokens in scheduled.items()},
            scheduled_spec_decode_tokens={name: tokens for name, tokens in drafts.items() if tokens},
        )
        accepted = torch.tensor([self.requests[name].num_accepted for name in names], dtype=torch.int32)
        tables = torch.tensor([self.requests[name].slots for name in names], dtype=torch.int32)
        batch = SimpleNamespace(req_ids=names, block_tables=[tables], num_accepted_tokens_gpu=accepted)

        preprocess_mamba(
            output, self.config, self.columns, batch, self.requests, self.layers, STATE_TYPES,
            self.buffers.preprocess,
        )  # fmt: skip
        for row, name in enumerate(names):
            right = self.forward(name, int(accepted[row]), scheduled[name], bool(drafts[name]))
            accepted[row] = 1 + right
        stage_postprocess_inputs_to_gpu(
            self.buffers.postprocess_align, output, names, len(names), self.requests, self.columns
        )
        num_accepted = accepted.tolist()
        postprocess_mamba_align_gpu(
            bufs=self.buffers, num_reqs=len(names), num_accepted_tokens_gpu=accepted, input_batch=batch,
            kv_cache_config=self.config, forward_context=self.layers, mamba_state_copy_funcs=STATE_TYPES,
        )  # fmt: skip
        for row, name in enumerate(names):
            request = self.requests[name]
            certain = request.num_computed_tokens + len(scheduled[name]) - len(drafts[name])
            request.num_computed_tokens = certain + num_accepted[row] - 1
            request.num_accepted = int(accepted[row])
            block = self.config.block_size_tokens
            boundary = request.num_computed_tokens // block * block
            if boundary >= max(certain, 1):
                request.boundaries.append(boundary)

    def drafts_of(self, request: Request, draw: random.Random) -> list[float]:
        """Drafts of a request that decodes: the coming tokens, perhaps wrong from one of them on."""
        start = request.num_computed_tokens + 1
        if request.num_computed_tokens < request.num_prompt_tokens:
            return []
        coming = request.text[start : start + self.config.num_speculative_tokens]
        right = draw.randint(0, len(coming))
        return coming[:right] + [token + 1 for token in coming[right:]]

    def tokens_of(self, request: Request, drafts: list[float], draw: random.Random) -> list[float]:
        """What the request computes in this step: a part of its prompt, or one token and its drafts."""
        start = request.num_computed_tokens
        rest = request.num_prompt_tokens - start
        return (
            request.text[start : start + draw.randint(1, rest)]
            if rest > 0
            else [request.text[start], *drafts]
        )

    def forward(self, name: str, num_accepted: int, tokens: list[float], keeps_all: bool) -> int:
        """Compute tokens as a model in align mode does; returns how many drafts were right.

        The state comes from the running column, behind the tokens that the last step accepted. A step with
        drafts keeps the state after each token; any other step keeps its last state.
        """
        request, column, bias = self.requests[name], self.columns[name], num_accepted - 1
        start = request.num_computed_tokens
        state, window = torch.zeros(4, dtype=torch.float64), [0.0] * HISTORY
        if start:
            state = self.ssm[request.slots[column + bias]].clone()
            window = self.conv[request.slots[column], 0, bias : bias + HISTORY].tolist()
        self.compare(name, start, state, window)
        inputs = window + tokens
        for place in range(len(tokens)):
            state = next_state(state, inputs[place : place + HISTORY + 1])
            if keeps_all or place == len(tokens) - 1:
                self.ssm[request.slots[column + (place if keeps_all else 0)]] = state
        kept = inputs[1:] if keeps_all else inputs[-HISTORY:]
        self.conv[request.slots[column], 0, : len(kept)] = torch.tensor(kept, dtype=torch.float64)
        right = [a == b for a, b in zip(tokens[1:], request.text[start + 1 :], strict=False)]
        return right.index(False) if keeps_all and False in right else len(right) * keeps_all

    def compare(self, name: str, num_tokens: int, state: torch.Tensor, window: list[float]) -> None:
        right, inputs = self.plain[name][num_tokens]
        self.num_reads += 1
        self.num_wrong += not (torch.equal(state, right) and window == inputs)

    def compare_boundaries(self, name: str) -> None:
        """Compare all states that the request left on block boundaries."""
        request = self.requests[name]
        for boundary in request.boundaries:
            slot = request.slots[boundary // self.config.block_size_tokens - 1]
            self.compare(name, boundary, self.ssm[slot], self.conv[slot, 0, :HISTORY].tolist())

    def finish(self, names: list[str]) -> None:
        """Forget the columns of requests that are done."""
        output = SimpleNamespace(
            finished_req_ids=set(names),
            preempted_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        cleanup_mamba_state_idx(output, self.columns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4, help="requests before the last one; default 4")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens of a step; default 3")
    parser.add_argument("--block", type=int, default=8, help="tokens of a block; default 8")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.requests < 1 or not 1 <= arguments.drafts < arguments.block:
        parser.error("--requests must be at least 1, and --drafts from 1 to --block - 1")

    draw = random.Random(arguments.seed)
    block, length = arguments.block, 10 * arguments.block
    num_columns = length // block + 1 + arguments.drafts
    names = [f"request {number}" for number in range(arguments.requests)] + ["resumed"]
    slots = list(range(len(names) * num_columns))
    draw.shuffle(slots)
    requests = {}
    for number, name in enumerate(names):
        text = [float(draw.randint(0, 9)) for _ in range(length)]
        own = slots[number * num_columns : (number + 1) * num_columns]
        requests[name] = Request(text, draw.randint(1, 3 * block), own)
    config = MambaCacheConfig(block, (("layer",),), arguments.drafts)
    first, last = requests[names[0]], requests[names[-1]]
    last.text = first.text[: 6 * block] + last.text[6 * block :]
    host = Host(requests, len(slots), config)

    def serve(served: list[str]) -> None:
        while running := [name for name in served if requests[name].num_computed_tokens < length]:
            draw.shuffle(running)
            host.step(running, draw)
        host.finish(served)
        for name in served:
            host.compare_boundaries(name)

    serve(names[:-1])
    # The prefix cache's part: name the slot of a kept state in the table of the request that starts from it.
    boundary = max(tokens for tokens in first.boundaries if tokens <= 6 * block)
    last.slots[boundary // block - 1] = first.slots[boundary // block - 1]
    last.num_computed_tokens = boundary
    serve(names[-1:])

    for name, request in requests.items():
        print(f"{name:12} {length} tokens, states kept at {request.boundaries}")
    print(f"{names[-1]} started from the state of {names[0]} after {boundary} tokens")
    print(f"{host.num_reads} states compared with a plain recurrence, {host.num_wrong} wrong")
    print(f"all states right: {'no' if host.num_wrong else 'yes'}")
    return 1 if host.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
