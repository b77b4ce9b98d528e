"""Engines of random settings: pools of one slot, barely enough KV, drafts of any kind."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

import mambaslots as ms
from mambaslots.inference.contexts.step_inputs import Model
from oracle.plans import SwitchedPlan

from .faulty_copies import make_faulty
from .ledger import Entry
from .toy_answers import answer
from .toy_lm import TOYS, ToyLM

LONGEST = 96  # tokens of a prompt and its answer
LONGEST_PROMPT = 66
ALPHABET = 29  # fewer than the vocabulary has: prompts repeat themselves


class KnowingDrafter:
    """Drafts right answers, wrong ones, or right ones that turn wrong.

    Attributes:
        entries: gives the requests whose answers are known.
    """

    def __init__(self, random: Random, kind: str) -> None:
        self._random = random
        self._kind = kind
        self.entries: Callable[[], Iterable[Entry]] = list

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        right = self._right(tuple(tokens))[:max_drafts]
        wrong = [self._random.randrange(ALPHABET) for _ in range(max_drafts)]
        if self._kind == "wrong":
            return [(token + 1) % ALPHABET for token in right] or wrong
        if self._kind == "right":
            return right
        return (right[: self._random.randint(0, max_drafts)] + wrong)[: self._random.randint(0, max_drafts)]

    def _right(self, tokens: tuple[int, ...]) -> list[int]:
        for entry in self.entries():
            prompt = entry.ask.prompt
            if not entry.mixed and len(prompt) < len(tokens) and tokens[: len(prompt)] == prompt:
                known, done = answer(entry.ask).tokens, tokens[len(prompt) :]
                if known[: len(done)] == done:
                    return list(known[len(done) :])
        return []


def random_plan(random: Random, block: int, longest: int = LONGEST_PROMPT) -> ms.CheckpointPlan:
    """`longest`: tokens of a prompt."""

    def positions(most: int) -> tuple[int, ...]:
        return tuple(random.randint(0, longest) for _ in range(random.randint(0, most)))

    return SwitchedPlan(
        branch=random.random() < 0.7,
        step_ends=random.random() < 0.7,
        decode=random.choice(["rolling", "rolling", "off", block, 2 * block]),
        prefill_interval=random.choice([None, None, block, 2 * block]),
        marks=positions(2),
    )


def random_engine(random: Random) -> tuple[ms.DynamicInferenceEngine, ToyLM, KnowingDrafter | None]:
    block = random.choice([4, 8, 16])
    chunked = random.random() < 0.8
    fewest = -(-LONGEST // block)
    drafts = random.choice([0, 0, 1, 3, 20])
    config = ms.InferenceConfig(
        block_size_tokens=block,
        max_requests=random.randint(1, 5),
        max_tokens_per_step=max(block, random.choice([8, 13, 32, 64])) if chunked else LONGEST + 5,
        max_sequence_length=LONGEST,
        num_kv_blocks=fewest + random.choice([0, 0, 2, 6, fewest, 4 * fewest]),
        num_mamba_slots=random.choice([1, 2, 3, 6, 15, 40]),
        eviction_policy=random.choice(["value", "lru"]),
        checkpoint_plan=random_plan(random, block),
        num_speculative_tokens=drafts,
        async_scheduling=not drafts and random.random() < 0.5,
    )
    tier = Random(random.random())
    model = ToyLM(random.random() < 0.3, random.choice(list(TOYS.values())))
    drafter = None
    kind = random.choice(["right", "wrong", "mixed", "n-grams"])
    if drafts and kind != "n-grams":
        drafter = KnowingDrafter(random, kind)
    num_host_slots = tier.choice([0, 0, 1, 3, 40])
    config = with_tier(config, model, num_host_slots)
    engine = ms.DynamicInferenceEngine(model, config, drafter=drafter)
    if engine.context.prefix_cache.tiers is not None:
        held = engine.context.prefix_cache.tiers
        make_faulty(held, tier)
        held.min_tokens = held.min_tokens_from_file = tier.choice([1, block, 2 * block])
    return engine, model, drafter


def with_tier(config: ms.InferenceConfig, model: Model, num_host_slots: int) -> ms.InferenceConfig:
    """The same settings, with host memory for so many states."""
    gigabytes = num_host_slots * model.state_spec().slot_bytes / (1 << 30)
    return replace(config, host_cache_gb=gigabytes)
