"""The models of soak rounds, whose weights change, and what they must answer, token by token."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import numpy as np
import torch
from mambaslots.text import ByteTokenizer, ChatTemplate, GenerationDefaults, TextCodec

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from oracle.model_kinds import KINDS
from oracle.recurrent_lm import RecurrentLM, log_sum_exp
from oracle.served import SPECIALS, TEMPLATE
from oracle.toy_answers import Ask, draw

NUM_VERSIONS = 3
TOLERANCE = 1e-9  # of log-probs, float64
MAX_TOPS = 5
_KEPT = 8  # the oracle keeps where it is at every eighth token of the last prompt
_CHARACTERS = [*range(32, 127), 10, *b"\xc3\xa9\xbc"]  # answers are mostly made of these bytes


def config_of(kind: str) -> ms.models.HybridConfig:
    """A small float64 model of bytes, of a kind in `oracle.model_kinds.KINDS`."""
    shape = KINDS[kind]
    return ms.models.HybridConfig.tiny(
        dtype=torch.float64, vocab_size=256 + len(SPECIALS), hidden_size=32, mamba_num_heads=4,
        mamba_num_groups=2, mamba_state_dim=8, mamba_head_dim=8, mlp_hidden_size=32, pattern=shape.pattern,
        ssd_chunk_size=shape.ssd_chunk_size, delta_chunk_size=shape.delta_chunk_size,
        delta_num_key_heads=2, delta_key_dim=8, delta_num_value_heads=4, delta_value_dim=8,
    )  # fmt: skip


def model_of(kind: str, version: int) -> ms.models.HybridLM:
    """The model with the weights of a version. Most of what it answers can be read."""
    model = ms.models.HybridLM(config_of(kind), seed=version)
    others = [token for token in range(256 + len(SPECIALS)) if token not in _CHARACTERS]
    with torch.no_grad():
        model.state_dict()["lm_head"][others] *= 0.3
    return model


def loaded_of(model: ms.models.HybridLM) -> ms.LoadedModel:
    """The model with a tokenizer of bytes and a chat template. Its answers end at no token of their own."""
    text = TextCodec(ByteTokenizer(SPECIALS), ChatTemplate(TEMPLATE))
    return ms.LoadedModel(text, GenerationDefaults(), Path("soak"), model)


def text_of(tokens: Iterable[int]) -> str:
    """The text of an answer: its bytes, without special tokens."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


@dataclass(frozen=True)
class Expected:
    """A complete answer, as the recurrence gives it."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    tops: tuple[tuple[float, ...], ...]


class Oracle:
    """Answers token by token, in numpy. Of the package only configurations and weights are used.

    What prompts share at their beginning is computed once: the oracle keeps where it was.
    """

    def __init__(self, kind: str) -> None:
        self._models = [RecurrentLM(model_of(kind, version)) for version in range(NUM_VERSIONS)]
        self._paths: list[tuple[tuple[int, ...], dict[int, Any]]] = [((), {})] * NUM_VERSIONS

    def answer(self, ask: Ask) -> Expected:
        """The whole answer to a prompt, under the weights of `ask.version`."""
        model = self._models[ask.version]
        logits = self._behind(ask)
        tokens: list[int] = []
        log_probs: list[float] = []
        tops: list[tuple[float, ...]] = []
        while True:
            token = draw(logits, ask, len(tokens))
            all_log_probs = logits - log_sum_exp(logits)
            tokens.append(token)
            log_probs.append(float(all_log_probs[token]))
            tops.append(tuple(np.sort(all_log_probs)[::-1][:MAX_TOPS].tolist()))
            if token in ask.stops or len(tokens) == ask.length:
                return Expected(tuple(tokens), tuple(log_probs), tuple(tops))
            logits = model.step(token)

    def _behind(self, ask: Ask) -> Any:
        """The logits behind a prompt."""
        model, (known, kept) = self._models[ask.version], self._paths[ask.version]
        places = [at for at in kept if at < len(ask.prompt) and known[:at] == ask.prompt[:at]]
        start = max(places, default=0)
        model.reset()
        if start:
            model.states, model.keys, model.values = _copied(kept[start])
            model.position = start
        kept = {at: kept[at] for at in places}
        for at in range(start, len(ask.prompt)):
            if at % _KEPT == 0:
                kept[at] = _copied((model.states, model.keys, model.values))
            logits = model.step(ask.prompt[at])
        self._paths[ask.version] = ask.prompt, kept
        return logits


def in_order(asks: Iterable[tuple[Ask, Any]]) -> list[tuple[Ask, Any]]:
    """The asks, so that those with a common beginning are neighbours."""
    return sorted(asks, key=lambda one: (one[0].version, one[0].prompt))


def seeded(ask: Ask, number: int) -> Ask:
    """What answer `number` to a prompt asks."""
    return replace(ask, seed=(ask.seed + number) & (2**63 - 1))


def random_sampling(random: Random) -> dict[str, Any]:
    """How tokens are drawn, as fields of a body and of `Ask`."""
    return dict(
        random.choice([
            {}, {}, {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 7},
            {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
        ])
    )  # fmt: skip


def random_text(random: Random, length: int) -> str:
    """Words of small letters, and now and then a character of several bytes."""
    letters = "abcdefghijklmnopqrst     é€\n"
    return "".join(random.choice(letters) for _ in range(length))


def _copied(place: tuple[dict[str, Any], Sequence[Any], Sequence[Any]]) -> Any:
    states, keys, values = place  # arrays of keys and values are made anew at each token
    return {name: tensor.copy() for name, tensor in states.items()}, list(keys), list(values)
