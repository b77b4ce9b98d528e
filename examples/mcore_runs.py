"""The runs of `mcore_dynamic_inference.py`: conversations served without a cache, and with either cache."""

import gc
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mambaslots.mcore
import mcore_rig
import torch
from conversation_texts import SYSTEM_PROMPTS, Conversation
from mcore_rig import Served

Answers = list[list[list[int]]]  # by turn, by conversation


@dataclass(frozen=True)
class Load:
    """What is asked of a model. Lengths are tokens; those of the texts are bytes.

    Attributes:
        system_prompt: of each conversation.
        answer: of each request.
        step: computed at most in a step.
        whole: of the longest prompt.
        kv_blocks, state_slots: in the pools, for each conversation.
        only_last_logits: whether a prefill computes no logits but its last.
    """

    system_prompt: int
    answer: int
    step: int
    whole: int
    kv_blocks: int
    state_slots: int = 16
    only_last_logits: bool = False


LOADS = {
    "tiny": Load(160, 48, 4 * mcore_rig.BLOCK, 1024, 64),  # interpreted kernels are slow enough
    "8b": Load(2000, 128, 2048, 3072, 24, only_last_logits=True),
}


@dataclass
class Run:
    """What serving all conversations once came to.

    Attributes:
        seconds: by the clock, without building the engine.
        served: by turn, by conversation.
        timed: the same with the run's own answers sent again, after the kernels were compiled.
    """

    name: str
    cuda_graphs: bool = False
    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    served: list[list[Served]] = field(default_factory=list)
    stats: Any = None
    ranks: int = 1
    timed: list["Run"] = field(default_factory=list)

    @property
    def num_resumed_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    @property
    def answers(self) -> Answers:
        return [[one.tokens for one in turn] for turn in self.served]

    @property
    def ttfts_s(self) -> list[float]:
        return [one.ttft_s for turn in self.served for one in turn if one.ttft_s is not None]

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(one.tokens) for turn in self.served for one in turn)

    def identical(self, other: "Run") -> int:
        """Requests with the same answer as in the other run."""
        return self.requests - len(list(self.first_differences(other)))

    def first_differences(self, other: "Run") -> Iterator[tuple[int, float | None]]:
        """Of each answer that is another one: tokens before it differs, and the other run's gap there."""
        for ours, theirs in zip(self.served, other.served, strict=True):
            for one, reference in zip(ours, theirs, strict=True):
                pairs = enumerate(zip(one.tokens, reference.tokens, strict=True))
                first = next((index for index, (a, b) in pairs if a != b), None)
                if first is not None:
                    yield first, reference.gaps[first] if reference.gaps else None


class Host:
    """megatron-core's engine around one model, made anew for each run.

    Args:
        users: who is served, all at a time.
    """

    def __init__(self, model: mcore_rig.HybridModel, users: list[Conversation], load: Load) -> None:
        self.model, self.users, self.load = model, users, load
        self.rank = torch.distributed.get_rank()

    def reference(self) -> Run:
        """Without a cache, and whole prompts at a time: in stock, the last chunk of a prompt may go wrong."""
        engine = self._engine(prefix_caching=False, max_tokens=self.load.whole * len(self.users))
        return self._serve("no cache", engine, top_n_logprobs=2)

    def cached(self, without: Run, cuda_graphs: bool = False) -> list[Run]:
        """With megatron-core's own cache, and with mambaslots."""
        return [self._row(name, without, cuda_graphs) for name in ("stock", "mambaslots")]

    def measured(self, without: Run, cuda_graphs: bool, rounds: int) -> list[Run]:
        """No cache, stock, mambaslots, in steps of equal size.

        Each first answers the prompts of `without`, which also compiles its kernels. Then it is timed: there
        each sends its own answers again, as clients do.
        """
        runs = [self._row(name, without, cuda_graphs) for name in ("no cache", "stock", "mambaslots")]
        for number in range(rounds):
            for run in runs[:: -1 if number % 2 else 1]:
                run.timed.append(self._row(run.name, None, cuda_graphs))
        return runs

    def _row(self, name: str, without: Run | None, cuda_graphs: bool) -> Run:
        options: dict[str, Any] = {"max_tokens": self.load.step, "enable_chunked_prefill": True}
        if name == "no cache":
            options["prefix_caching"] = False
        else:
            options["num_mamba_slots"] = self.load.state_slots * len(self.users)
        # For good, instead of for a while: mambaslots.mcore.install()
        with mambaslots.mcore.installed() if name == "mambaslots" else nullcontext():
            engine = self._engine(cuda_graphs=cuda_graphs, **options)
            sampling = {"return_log_probs": False} if self.load.only_last_logits else {}
            run = self._serve(name, engine, without.answers if without else None, **sampling)
            run.cuda_graphs = cuda_graphs
            if name == "mambaslots":
                run.stats = mambaslots.mcore.stats(engine.context)
        return run

    def _engine(self, **options: Any) -> Any:
        ranks = torch.distributed.get_world_size()
        rows = -(-len(self.users) // ranks) * ranks  # megatron-core wants a multiple
        gc.collect()  # engines are in cycles, and hold pools
        return mcore_rig.make_engine(
            self.model,
            max_requests=rows,
            num_kv_blocks=self.load.kv_blocks * rows,
            materialize_only_last_token_logits=self.load.only_last_logits,
            **options,
        )

    def _serve(self, name: str, engine: Any, history: Answers | None = None, **sampling: Any) -> Run:
        """`history` holds the answers to send again; without it, those of this run."""
        users = self.users
        run = Run(name, ranks=torch.distributed.get_world_size())
        transcripts = [system_prompt(user, self.load.system_prompt) for user in users]
        started = time.perf_counter()
        for turn in range(len(users[0].turns)):
            for transcript, user in zip(transcripts, users, strict=True):
                transcript.extend(f"\nUser: {user.turns[turn].text}\nBot: ".encode())
            numbers = [mcore_rig.add(engine, prompt, self.load.answer, **sampling) for prompt in transcripts]
            done = mcore_rig.finish(engine)
            run.seconds = time.perf_counter() - started
            run.served.append([done[number] for number in numbers])
            run.requests += len(numbers)
            run.prompt_tokens += sum(map(len, transcripts))
            for transcript, answer in zip(transcripts, (history or run.answers)[turn], strict=True):
                transcript.extend(answer)
            if self.rank == 0:
                print(f"{name:>13}: turn {turn + 1}, {run.seconds:5.1f} s", flush=True)
        run.computed_tokens = engine.context.lifetime_prefill_token_count
        return run


def system_prompt(user: Conversation, num_bytes: int) -> list[int]:
    """The user's, followed by those of others where it is too short."""
    others = [text for text in SYSTEM_PROMPTS if text != user.system_prompt]
    text = "\n\n".join([user.system_prompt, *others]).encode()
    if len(text) < num_bytes:
        raise ValueError(f"num_bytes is {num_bytes}; accepted: at most {len(text)}")
    return list(text[:num_bytes])


def agree_on_all_ranks(runs: list[Run]) -> None:
    """RuntimeError where a rank has other answers, or has resumed elsewhere, than rank 0."""
    every = [one for run in runs for one in (run, *run.timed)]
    ours = [(run.name, run.answers, run.computed_tokens) for run in every]
    seen: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, ours)
    if any(other != ours for other in seen):
        raise RuntimeError("ranks differ in answers or in the tokens that they computed")


if __name__ == "__main__":
    print(__doc__)
