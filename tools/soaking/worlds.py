"""Engines of random settings, and prompts of the generated traces in small."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import soaking.rounds  # noqa: F401  (whose path has the oracles)
import torch
from mambaslots.devices import GIGABYTE
from mambaslots.inference.contexts.pool_sizes import PoolSizes
from mambaslots.models import HybridConfig, HybridLM
from mambaslots.replay.generate import GENERATORS, Draws
from mambaslots.replay.trace import Tokens, TraceRequest
from oracle.faulty_copies import CopyFailedError, FaultyCopies, make_faulty
from oracle.memory_poison import poison
from oracle.model_kinds import KINDS, WITH_ATTENTION, kind_of_model
from oracle.random_engine import random_plan
from oracle.serving import small_config
from oracle.toy_lm import ForwardError
from torch import Tensor

SESSIONS = 4
KEPT = 24
SHAPES: dict[str, tuple[float, int]] = {
    "chat": (SESSIONS / 240, 2000),
    "agent": (SESSIONS / 72, 9000),
    "documents": (SESSIONS / 120, 16000),
    "fork": (SESSIONS / 150, 2000),
    "unique": (SESSIONS / 1500, 1800),
}
"""Of each generated trace: the scale of a few sessions, and tokens of a usual prompt."""


class SmallDraws(Draws):
    """Draws lengths as traces have them; texts are shorter by one factor, at least one token."""

    def __init__(self, factor: float, *seed: int) -> None:
        super().__init__(*seed)
        self._factor = factor

    def text(self, num_tokens: int) -> Tokens:
        return super().text(max(1, round(num_tokens * self._factor)))


class Prompts:
    """Draws prompts.

    Most are the next request of one of several traces. Others repeat an earlier prompt, part from it
    somewhere, or go on from an answer. `finished` takes answers.
    """

    def __init__(self, random: Random, longest: int, alphabet: int) -> None:
        self._random, self._longest, self._alphabet = random, longest, alphabet
        self.counts: Counter[str] = Counter()
        self._coming: dict[str, list[TraceRequest]] = {shape: [] for shape in SHAPES}
        self._asked: deque[list[int]] = deque(maxlen=KEPT)
        self._finished: deque[list[int]] = deque(maxlen=KEPT)

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self._random.randrange(self._alphabet) for _ in range(count)]

    def finished(self, tokens: Sequence[int]) -> None:
        """A prompt and its answer: a later turn may go on from them."""
        self._finished.append(list(tokens))

    def prompt(self) -> list[int]:
        """The next prompt."""
        chance = self._random.random()
        if self._asked and chance < 0.15:
            what, prompt = "repeated", self._random.choice(self._asked)
        elif self._asked and chance < 0.3:
            what, prompt = "forked", self._random.choice(self._asked)
            prompt = prompt[: self._random.randint(1, len(prompt))] + self.tokens(self._random.randint(1, 9))
        elif self._finished and chance < 0.5:
            what, prompt = "behind an answer", self._random.choice(self._finished)
            prompt = prompt + self.tokens(self._random.randint(1, 9))
        else:
            what, prompt = self._of_a_trace()
        self.counts[f"prompts: {what}"] += 1
        prompt = prompt[: self._longest]
        self._asked.append(prompt)
        return prompt

    def _of_a_trace(self) -> tuple[str, list[int]]:
        shape = self._random.choice(list(SHAPES))
        coming = self._coming[shape]
        if not coming:
            scale, usual = SHAPES[shape]
            factor = self._longest / usual / self._random.choice([1, 2, 4])
            coming += GENERATORS[shape](SmallDraws(factor, self._random.randrange(1 << 30)), scale)
            coming.sort(key=lambda request: (-request.arrival_s, -request.session))
        return shape, (coming.pop().prompt % self._alphabet).tolist()


NUM_VERSIONS = 3
BITS_MODEL: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "mamba_num_groups": 2, "mamba_state_dim": 128, "conv_kernel": 4, "ssd_chunk_size": 128,
    "delta_num_key_heads": 2, "delta_key_dim": 128, "delta_num_value_heads": 4, "delta_value_dim": 128,
    "delta_chunk_size": 64,
    "num_attention_heads": 8, "num_kv_heads": 2, "head_dim": 128, "mlp_hidden_size": 1024,
}  # fmt: skip
"""Heads of real sizes, few layers."""


@dataclass(frozen=True)
class Lengths:
    """How long requests are, in tokens."""

    block: int
    longest: int
    longest_prompt: int
    answers: tuple[int, ...]


SMALL = Lengths(8, 152, 120, (1, 2, 3, 5, 8, 13, 24))
LARGE = Lengths(128, 1024, 880, (1, 2, 5, 13, 24, 40, 140))


class RememberingDrafter:
    """Drafts how a sequence went on that was served before; else random tokens, or none."""

    def __init__(self, random: Random, vocabulary: int) -> None:
        self._random, self._vocabulary = random, vocabulary
        self._served: deque[list[int]] = deque(maxlen=24)

    def finished(self, tokens: Sequence[int]) -> None:
        self._served.append(list(tokens))

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        count, known = len(tokens), list(tokens)
        for served in self._served:
            if len(served) > count and served[:count] == known:
                return served[count : count + max_drafts]
        wrong = self._random.choice([0, 0, 1, max_drafts])
        return [self._random.randrange(self._vocabulary) for _ in range(wrong)]


class ServedLM:
    """A `HybridLM` with other weights at times, whose forwards fail or whose logits are NaN on demand.

    The attributes that `oracle.toy_lm.ToyLM` has, too, mean the same.
    """

    kind = None

    def __init__(self, versions: Sequence[HybridLM], in_place: bool) -> None:
        self.lm = HybridLM(versions[0].config, seed=0, device=versions[0].lm_head.device)
        self.fails = ""
        self.spoils: int | None = None
        self.during: Callable[[], None] | None = None
        self.num_spoiled = 0
        self.on_weights: Callable[[int], None] = lambda version: None
        self._versions, self._in_place = versions, in_place
        self._version = 0
        self.lm.load_state_dict(versions[0].state_dict())

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            self.on_weights(version)
            self._version = version
            self.lm.load_state_dict(self._versions[version].state_dict())

    def state_spec(self) -> ms.HybridStateSpec:
        spec = self.lm.state_spec()
        return replace(spec, separate_states=False) if self._in_place else spec

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise ForwardError(fails)
        during, self.during = self.during, None
        if during is not None:
            during()
        logits = self.lm(inputs)
        if self.spoils is not None and len(logits):
            logits[self.spoils % len(logits)] = torch.nan
            self.spoils = None
            self.num_spoiled += 1
        if fails == "after":
            raise ForwardError(fails)
        return logits


class FailingCopies(FaultyCopies):
    """Copies that fail at times, and are otherwise as they are."""

    def store(self, slot: int, host_slot: int, serial: int) -> None:
        if self._fails():
            raise CopyFailedError
        self._copies.store(slot, host_slot, serial)


@dataclass
class World:
    """An engine, and what its answers are held against."""

    engine: ms.DynamicInferenceEngine
    model: ServedLM
    versions: list[HybridLM]
    lengths: Lengths
    drafter: RememberingDrafter | None
    copies: FaultyCopies | None
    encoded: str | None
    uncached: ms.InferenceConfig
    bits: bool = False

    @property
    def refuses_by_value(self) -> bool:
        return self.engine.config.eviction_policy == "value"


def small_world(random: Random, turn: int, folder: Path) -> World:
    """A float64 engine on the CPU. `turn`: by it kinds of models, and of stored states, take turns."""
    kind = list(KINDS)[(turn + turn // 12) % len(KINDS)]
    encoded = ["int8", "bfloat16"][turn // 4 % 2] if turn % 4 == 1 else None
    with kind_of_model(kind):
        config = small_config()
    versions = [HybridLM(config, seed=11 + version) for version in range(NUM_VERSIONS)]
    replays = encoded is None and random.random() < 0.3
    model = ServedLM(versions, in_place=not replays and random.random() < 0.2)
    block, longest = SMALL.block, SMALL.longest
    fewest = -(-longest // block)
    drafts = random.choice([0, 0, 1, 3, 6])
    alone = not drafts and encoded is None
    chunked = random.random() < 0.8
    settings: dict[str, Any] = {
        "block_size_tokens": block,
        "max_requests": random.randint(1, 5),
        # Replay takes steps of a chunk of 8 and a decode of each other request.
        "max_tokens_per_step": max(13 * replays, random.choice([8, 13, 32, 64])) if chunked else longest + 5,
        "max_sequence_length": longest,
        "eviction_policy": random.choice(["value", "value", "lru"]),
        "checkpoint_plan": random_plan(random, block, SMALL.longest_prompt),
        "num_speculative_tokens": drafts,
        "async_scheduling": alone and random.random() < 0.5,
        "decode_by_replay": replays,
        "durable_state_dtype": encoded,
        "salt_key": random.randbytes(16),
    }
    settings["free_memory"] = random.choice(["keep", "keep", "keep", "zero"])
    if random.random() < 0.3 and kind in WITH_ATTENTION:
        settings["total_gb"] = _least_total(settings, model.state_spec()) * random.uniform(1.0, 3.0)
    else:
        settings["num_kv_blocks"] = fewest + random.choice([0, 0, 2, 6, fewest, 4 * fewest])
        settings["num_mamba_slots"] = random.choice([1, 2, 3, 6, 15, 40])
    if encoded is None:
        settings |= _tiers(random, model.state_spec(), block, folder)
    if turn % 4 == 2:
        settings |= _deep_tiers(random, model.state_spec(), folder)
    drafter = _drafter(random, 256) if drafts else None
    engine = ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings), drafter=drafter)
    if settings["free_memory"] == "keep" and not settings["async_scheduling"] and random.random() < 0.3:
        poison(engine)
    copies = _make_faulty(engine, random, FaultyCopies)
    uncached = ms.InferenceConfig(
        block_size_tokens=block, max_requests=8, max_tokens_per_step=256, max_sequence_length=longest,
        num_kv_blocks=8 * fewest, enable_prefix_caching=False,
    )  # fmt: skip
    remembers = drafter if isinstance(drafter, RememberingDrafter) else None
    return World(engine, model, versions, SMALL, remembers, copies, encoded, uncached)


BITS_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("M-G*C-M", {"num_mamba_slots": 3, "num_kv_blocks": 48, "num_cuda_graphs": 8}),
    ("M-*-M-", {"num_mamba_slots": 5, "num_kv_blocks": 32, "num_speculative_tokens": 3}),
    ("G-*-G-", {"num_mamba_slots": 2, "num_kv_blocks": 16, "max_tokens_per_step": 384}),
    ("M-G*C-M", {"total_gb": 1.5, "num_speculative_tokens": 3, "max_tokens_per_step": 256}),
)
"""Models, and settings of engines for the bits of answers. `total_gb` is a multiple of the least."""


def bits_world(random: Random, turn: int, device: str) -> World:
    """An engine with `batch_invariant` on a GPU; on a CPU, the same in float64 with decodes by replay."""
    pattern, shape = BITS_SHAPES[turn % len(BITS_SHAPES)]
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float64
    config = HybridConfig(pattern=pattern, dtype=dtype, **BITS_MODEL)
    if not on_gpu:
        config = replace(small_config_of(pattern), dtype=dtype)
    lengths = LARGE if on_gpu else SMALL
    place = torch.device(device)
    versions = [HybridLM(config, seed=11 + version, device=place) for version in range(NUM_VERSIONS)]
    model = ServedLM(versions, in_place=False)
    block, longest = lengths.block, lengths.longest
    common: dict[str, Any] = {
        "block_size_tokens": block,
        "max_sequence_length": longest,
        "max_requests": 8,
        "max_tokens_per_step": longest,
        "num_cuda_graphs": 16,
        "free_memory": "zero" if turn // len(BITS_SHAPES) % 2 == 1 else "keep",
    }
    common |= {"batch_invariant": True} if on_gpu else {"decode_by_replay": True}
    settings = common | {"eviction_policy": "value", "salt_key": random.randbytes(16)} | shape
    if not on_gpu:  # its lengths are shorter
        settings["max_tokens_per_step"] = shape.get("max_tokens_per_step", 1024) * longest // 1024
        if "num_kv_blocks" in shape:
            settings["num_kv_blocks"] = shape["num_kv_blocks"] + 8
    if "total_gb" in shape:
        settings["total_gb"] = shape["total_gb"] * _least_total(settings, model.lm.state_spec())
    settings["host_cache_gb"] = 24 * model.lm.state_spec().slot_bytes / GIGABYTE
    drafter = _drafter(random, config.vocab_size, turn) if shape.get("num_speculative_tokens") else None
    # The engine gets the model itself: what it checks and replaces for the sake of bits, it finds there.
    engine = ms.DynamicInferenceEngine(model.lm, ms.InferenceConfig(**settings), drafter=drafter)
    copies = _make_faulty(engine, random, FailingCopies, 0.05)
    uncached = ms.InferenceConfig(
        **common
        | {
            "num_kv_blocks": 32 * longest // block,
            "enable_prefix_caching": False,
            "max_requests": 32,
            "num_cuda_graphs": None,  # other weights would drop its graphs
        }
    )
    remembers = drafter if isinstance(drafter, RememberingDrafter) else None
    return World(engine, model, versions, lengths, remembers, copies, None, uncached, bits=on_gpu)


def small_config_of(pattern: str) -> HybridConfig:
    """The shape of `oracle.serving.small_model` with other layers."""
    with kind_of_model("mix of all"):
        return small_config(pattern=pattern)


def _drafter(random: Random, vocabulary: int, turn: int | None = None) -> ms.Drafter | None:
    """None drafts n-grams."""
    remembers = random.random() < 0.7 if turn is None else turn % 2 == 1
    return RememberingDrafter(random, vocabulary) if remembers else None


def _least_total(settings: dict[str, Any], spec: ms.HybridStateSpec) -> float:
    """GB that an engine with these settings and one memory takes at least, or hardly more."""
    total = spec.slot_bytes / GIGABYTE
    pools = {"num_kv_blocks": None, "num_mamba_slots": None}
    while True:
        try:
            PoolSizes.of(ms.InferenceConfig(**(settings | pools | {"total_gb": total})), spec)
        except ValueError as error:
            if not str(error).startswith("total_gb"):
                raise
            total *= 1.05
        else:
            return total


def _tiers(random: Random, spec: ms.HybridStateSpec, block: int, folder: Path) -> dict[str, Any]:
    num_host, num_disk = random.choice([0, 1, 1, 3, 40]), random.choice([0, 2, 30, 30])
    if not num_host:
        return {}
    tiers: dict[str, Any] = {
        "host_cache_gb": num_host * spec.slot_bytes / GIGABYTE,
    }
    if num_disk:
        tiers["disk_cache"] = (str(folder), num_disk * spec.slot_bytes / GIGABYTE)
    return tiers


def _deep_tiers(random: Random, spec: ms.HybridStateSpec, folder: Path) -> dict[str, Any]:
    """Few slots, much KV, and room below: most states leave, and come back."""
    return {
        "num_mamba_slots": random.choice([1, 2, 3]),
        "num_kv_blocks": 200,
        "total_gb": None,
        "eviction_policy": random.choice(["value", "lru"]),
        "host_cache_gb": random.choice([1, 3]) * spec.slot_bytes / GIGABYTE,
        "disk_cache": (str(folder), 60 * spec.slot_bytes / GIGABYTE),
    }


def _make_faulty(
    engine: ms.DynamicInferenceEngine, random: Random, faulty: type[FaultyCopies], share: float = 0.15
) -> FaultyCopies | None:
    tier = engine.context.prefix_cache.tiers
    if tier is None:
        return None
    return make_faulty(tier, Random(random.random()), share, faulty)
