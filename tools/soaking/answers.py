"""What engines of a soak must answer: a recurrence token by token, or an engine without cache."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mambaslots as ms
import soaking.rounds  # noqa: F401  (whose path has the oracles)
from mambaslots.models import HybridLM
from oracle.ledger import TOLERANCE, Entry
from oracle.recurrent_lm import RecurrentLM
from oracle.stored_states import RoundedEngine
from oracle.toy_answers import Answer, answer_of, prompt_log_probs_of

MOST_KEPT = 256


@dataclass(eq=False)
class SoakEntry(Entry):
    """A request of a soak.

    Attributes:
        oracle: says the answer at once; None for a request that an uncached engine answers later, or whose
            answer nobody computes.
        later: whether an uncached engine answers it once it has ended.
        found, found_prompt: what that engine said.
        bits: whether log-probs must be equal to the bit.
    """

    oracle: "Recurrences | RoundedAnswers | None" = None
    later: bool = False
    found: Answer | None = None
    found_prompt: tuple[float, ...] = ()
    bits: bool = False

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 0.0 if self.bits else TOLERANCE

    @property
    def expected(self) -> Answer | None:
        return self.found if self.oracle is None else self.oracle.answer(self)

    @property
    def expected_prompt_log_probs(self) -> tuple[float, ...]:
        if isinstance(self.oracle, Recurrences):
            return self.oracle.prompt_log_probs(self.ask.prompt, self.ask.version)
        return self.found_prompt


class Recurrences:
    """Answers token by token in float64, of each version of the weights."""

    def __init__(self, versions: Sequence[HybridLM]) -> None:
        self._lms = [RecurrentLM(version) for version in versions]
        self._known: OrderedDict[object, object] = OrderedDict()

    def answer(self, entry: Entry) -> Answer:
        ask = entry.ask
        found = self._known.get(ask)
        if found is None:
            found = self._keep(ask, answer_of(self._at_its_beginning(ask.version), ask))
        assert isinstance(found, Answer)
        return found

    def prompt_log_probs(self, prompt: tuple[int, ...], version: int) -> tuple[float, ...]:
        return prompt_log_probs_of(self._at_its_beginning(version), prompt)

    def _at_its_beginning(self, version: int) -> RecurrentLM:
        self._lms[version].reset()
        return self._lms[version]

    def _keep[T](self, key: object, value: T) -> T:
        self._known[key] = value
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return value


class RoundedAnswers:
    """Greedy answers of the recurrence that an engine's encoded states stand for; see `RoundedEngine`."""

    def __init__(self, engine: ms.DynamicInferenceEngine, versions: Sequence[HybridLM], dtype: str) -> None:
        self._versions = versions
        self._rounded = RoundedEngine(engine, versions[0], dtype)

    def use_version(self, version: int) -> None:
        self._rounded.read_weights(self._versions[version])

    def forget(self, request_id: int) -> None:
        self._rounded.log_probs.pop(request_id, None)

    def forget_all(self) -> None:
        self._rounded.log_probs.clear()

    def answer(self, entry: Entry) -> Answer:
        """The answer as far as the engine has come."""
        ask = entry.ask
        known = self._rounded.known(entry.request_id, len(ask.prompt))[: ask.length]
        stop = next((at for at, (token, _) in enumerate(known) if token in ask.stops), None)
        known = known if stop is None else known[: stop + 1]
        tokens, log_probs = zip(*known, strict=True) if known else ((), ())
        return Answer(tokens, log_probs, "length" if stop is None else "stop")


class UncachedEngine:
    """An engine of its own, without cache, whose model has the weights of any version."""

    def __init__(self, model: HybridLM, versions: Sequence[HybridLM], config: ms.InferenceConfig) -> None:
        """`model`: is served by this engine, and by no other one."""
        self._model, self._versions = model, versions
        self._loaded: int | None = None
        self._engine = ms.DynamicInferenceEngine(model, config)

    def answer(self, entries: Sequence[SoakEntry]) -> None:
        """Find the answers of entries of any versions."""
        for version in sorted({one.ask.version for one in entries}):
            self._use_version(version)
            asked = [one for one in entries if one.ask.version == version]
            results = self._engine.generate([one.ask.prompt for one in asked], [one.params for one in asked])
            for entry, result in zip(asked, results, strict=True):
                log_probs = tuple(result.log_probs or ())
                entry.found = Answer(tuple(result.tokens), log_probs, result.finish_reason)
                entry.found_prompt = tuple(result.prompt_log_probs or ())

    def scores(self, tokens: Sequence[int], start: int, version: int) -> list[float]:
        self._use_version(version)
        return self._engine.score([tokens], start)[0].log_probs

    def _use_version(self, version: int) -> None:
        if version != self._loaded:
            self._loaded = None  # a round's interrupts may come here, too
            self._model.load_state_dict(self._versions[version].state_dict())
            self._engine.set_weights_version(version)
            self._loaded = version
