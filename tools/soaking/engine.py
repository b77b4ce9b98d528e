"""Rounds of one engine: random worlds, random traffic, every answer checked."""

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import mambaslots as ms
import soaking.rounds  # noqa: F401  (whose path has the oracles)
import torch
from mambaslots.models import HybridLM
from mambaslots.net import load_prefixes, save_prefixes
from mambaslots.net.transfer.format import TransferError
from oracle.everything import Fuzzer, Totals
from oracle.faults import InjectedError, failing
from oracle.ledger import TOLERANCE, Entry, LeftWrongError, check_objects, objects
from oracle.memory_poison import is_poisoned
from oracle.recurrent_lm import RecurrentLM
from oracle.scrubbed import assert_scrubbed
from oracle.stored_states import RoundedEngine
from oracle.toy_answers import Answer, Ask, answer_of, prompt_log_probs_of
from soaking.rounds import RoundTally
from soaking.worlds import SHAPES, Prompts, World, bits_world, small_world

MAX_KEPT = 256


@dataclass(eq=False)
class SoakEntry(Entry):
    """A request of a soak.

    Attributes:
        oracle: says the answer at once; None for a request that an uncached engine answers later, or whose
            answer is not computed.
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
        if len(self._known) > MAX_KEPT:
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


COMMON_EVENTS = (
    "cancelled", "preempted", "weights", "suspended", "reset", "prefix caches reset", "dropped streams",
    "host-tier fetches", "failed copies", "drafts accepted", "refused by value", "imports", "resent",
    "bursts", "pinned", "scored", "warmed", "failed steps", *(f"prompts: {shape}" for shape in SHAPES),
    "prompts: repeated", "prompts: forked", "prompts: behind an answer", "hits behind a salt",
)  # fmt: skip
REQUIRED_EVENTS = {
    "cpu": (
        *COMMON_EVENTS, "int8 rounds", "bfloat16 rounds", "replay rounds", "async rounds",
        "one-memory rounds", "free memory was zero", "failed forwards", "paused", "interrupts",
        "toy rounds", "disk fetches",
        "held against an uncached engine", "held against the recurrence",
        "held against the rounded recurrence", "steps poisoned",
    ),
    "cuda": (*COMMON_EVENTS, "held against an uncached engine", "async rounds", "one-memory rounds"),
}  # fmt: skip
OPERATIONS = {
    "_burst": "bursts", "_resend": "resent", "_score": "scored", "_warm": "warmed",
    "_clear_prefixes": "prefix caches reset", "_suspend": "suspended", "_swap_weights": "weights",
}  # fmt: skip
"""What is counted of operations."""
POINTS = ("matching", "slot reservation", "inputs", "commit", "sampled")
"""Where a step fails; see `oracle.faults`."""
BATCH = 32
"""Requests that the uncached engine serves at once."""
TOY_EVERY = 8


class EngineRound(Fuzzer):
    """One engine, its requests, and what its answers are held against."""

    def __init__(self, seed: int, device: str, folder: Path) -> None:
        self.tally = RoundTally()
        self.num_operations = 0
        self._seed, self._device, self._folder = seed, device, folder
        turn = seed % 1000
        settings = Random(f"settings {seed}")
        self.world = self._new_world(settings, turn)
        world = self.world
        self.num_versions = len(world.versions)
        self.longest_prompt = world.lengths.longest_prompt
        self.answer_lengths = world.lengths.answers
        vocabulary = world.versions[0].config.vocab_size
        self._alphabet = min(settings.choice([3, 29, 256]), vocabulary)
        self._prompts = Prompts(Random(f"prompts {seed}"), self.longest_prompt, self._alphabet)
        self._recurrences = None if world.bits else Recurrences(world.versions)
        self._rounded: RoundedAnswers | None = None
        if world.encoded is not None:
            self._rounded = RoundedAnswers(world.engine, world.versions, world.encoded)
        served = HybridLM(world.versions[0].config, seed=0, device=torch.device(device))
        self._uncached = UncachedEngine(served, world.versions, world.uncached)
        self._unchecked: list[tuple[SoakEntry, ms.RequestResult]] = []
        self._check_every = settings.choice([1, 2, 5, 20])
        self._num_checks = 0
        self._share_compared = settings.choice([0.4, 0.7, 1.0])
        # The rounded recurrence would see half of an interrupted step.
        quiet = world.encoded is not None or world.bits
        super().__init__(seed, 0.0 if quiet else settings.choice([0.0, 0.0, 0.05]))
        self.engine.set_weights_version(self.model.version)
        world.model.on_weights = self._weights_change
        for weight, operation in (
            (2, self._burst), (2, self._resend), (1, self._import), (2, self._fail_at_a_point)
        ):  # fmt: skip
            self._operations += weight * [operation]
        calm = [self._advance] * 12 + [self._ask] * 6 + [self._serve] * 4 + [self._read] * 2
        self._operations += (8 if device == "cuda" else settings.choice([0, 2, 6])) * calm
        self._note_settings()

    def _new_world(self, random: Random, turn: int) -> World:
        if self._device == "cuda":
            return bits_world(random, turn, self._device)
        return small_world(random, turn, self._folder)

    def _engine_and_model(self) -> Any:
        return self.world.engine, self.world.model

    def _note_settings(self) -> None:
        config, events = self.engine.config, self.tally.events
        if self.world.encoded is not None:
            events[f"{self.world.encoded} rounds"] += 1
        events["replay rounds"] += config.replays
        events["async rounds"] += config.why_not_async(self.engine.context.spec.device) is None
        events["one-memory rounds"] += config.total_gb is not None
        events["draft rounds"] += config.num_speculative_tokens > 0

    # ---- one round

    def serve(self, seconds: float) -> None:
        """Operations until the time is over; then all is served, and nothing is left."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.num_operations += 1
            self.operate()
        self._check_every = 1
        self._end()
        self._check_later()
        self.engine.unobserve(self.watch)

    def check_integrity(self) -> None:
        self._num_checks += 1
        if self._num_checks % self._check_every == 0:
            super().check_integrity()
            if self.engine.config.free_memory == "zero":
                if self._device == "cuda":  # zeros may be on their way to host memory
                    torch.cuda.synchronize()
                assert_scrubbed(self.engine)
                self.tally.events["free memory was zero"] += 1

    # ---- what is asked

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self._alphabet) for _ in range(count)]

    def _prompt(self) -> list[int]:
        return self._prompts.prompt()

    def _entry(self, prompt: Sequence[int] | None = None) -> SoakEntry:
        entry = super()._entry(prompt)
        ask = entry.ask
        longest = self.world.lengths.longest - len(ask.prompt)
        greedy = self._rounded is not None
        ask = Ask(
            ask.prompt, min(ask.length, longest), ask.version, None if greedy else ask.temperature,
            None if greedy else ask.top_k, None if greedy else ask.top_p, ask.seed, ask.stops,
        )  # fmt: skip
        asked = SoakEntry(
            ask, salt=entry.salt, prompt_log_probs=entry.prompt_log_probs and not greedy,
            may_be_cut=entry.may_be_cut, bits=self.world.bits,
        )  # fmt: skip
        if self.random.random() < self._share_compared:
            if self._rounded is not None:
                asked.oracle = self._rounded
            elif self._recurrences is None or self.random.random() < 0.25:
                asked.later = True
            else:
                asked.oracle = self._recurrences
        self.tally.requests += 1
        return asked

    # ---- what came back

    def step(self) -> None:
        super().step()
        self._note_steps()

    def _note_steps(self) -> None:
        self.tally.events["paused"] += self.engine.core.scheduler.num_paused
        self.tally.events["steps poisoned"] += is_poisoned(self.engine)

    def _check(self, entry: Entry, result: ms.RequestResult) -> None:
        super()._check(entry, result)
        assert isinstance(entry, SoakEntry)
        tally, events = self.tally, self.tally.events
        tally.hits += result.num_resumed_tokens > 0
        events["hits behind a salt"] += result.num_resumed_tokens > 0 and entry.salt is not None
        tally.resumed_tokens += result.num_resumed_tokens
        events["preempted"] += (result.num_recomputed_tokens or 0) > 0
        events["cancelled"] += result.finish_reason == "cancelled"
        events["invalid logits"] += result.finish_reason == "invalid_logits"
        if entry.mixed:
            return
        served = [*entry.ask.prompt, *result.tokens]
        self._prompts.finished(served)
        if self.world.drafter is not None:
            self.world.drafter.finished(served)
        if entry.oracle is not None:
            self._count(entry, result, "the rounded recurrence" if self._rounded else "the recurrence")
        elif entry.later and entry.found is None:
            self._unchecked.append((entry, result))
            if len(self._unchecked) >= BATCH:
                self._check_later()

    def _count(self, entry: SoakEntry, result: ms.RequestResult, what: str) -> None:
        self.tally.comparisons += 1
        self.tally.tokens_compared += len(result.tokens)
        self.tally.events[f"held against {what}"] += 1
        resumed = result.num_resumed_tokens
        self.tally.events["compared answers that resumed"] += resumed > 0
        if isinstance(entry.oracle, RoundedAnswers):
            entry.oracle.forget(entry.request_id)

    def _check_later(self) -> None:
        """Hold answers against those of the uncached engine."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        self._uncached.answer([entry for entry, _ in unchecked])
        for entry, result in unchecked:
            entry.check(result)
            self._count(entry, result, "an uncached engine")

    def wanted_scores(self, tokens: Sequence[int], start: int) -> Sequence[float] | None:
        version = self.model.version
        if self._rounded is not None:
            return None
        self.tally.comparisons += 1
        self.tally.tokens_compared += len(tokens) - start
        if self._recurrences is None:
            return self._uncached.scores(tokens, start, version)
        return self._recurrences.prompt_log_probs(tuple(tokens), version)[start - 1 :]

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 0.0 if self.world.bits else 1e-9

    def _weights_change(self, version: int) -> None:
        """The model is about to get other weights: what has ended is checked before."""
        self._check_later()
        if self._rounded is not None:
            self._rounded.use_version(version)

    # ---- operations beside those of `Fuzzer`

    def _do(self, operation: Callable[[], None]) -> None:
        with suppress(InjectedError):
            super()._do(operation)
        if event := OPERATIONS.get(operation.__name__):
            self.tally.events[event] += 1

    def _burst(self) -> None:
        """The same prompt from several clients at once."""
        prompt = self._prompt()
        for _ in range(self.random.randint(2, 5)):
            self.add(self._entry(prompt))

    def _resend(self) -> None:
        """A client cancels right behind its admission, or before, and sends the same again."""
        prompt = self._prompt()
        request_id = self.add(self._entry(prompt))
        for _ in range(self.random.choice([0, 1, 1, 2])):
            if request_id in self.entries:
                self.step()
        if request_id in self.entries:
            self.cancel(request_id)
        self.add(self._entry(prompt))

    def _import(self) -> None:
        """Cached prefixes go to files, and come back once the cache has forgotten them."""
        if self._rounded is not None or not self.engine.context.memory.is_allocated:
            return
        folder = self._folder / "prefixes"
        saved = save_prefixes(self.engine, folder)
        if self.random.random() < 0.3:
            self._swap_weights()
            with suppress(TransferError):
                load_prefixes(self.engine, folder)
                raise LeftWrongError("stale", "prefixes of other weights were imported")
            return
        self._clear_prefixes()
        with suppress(ms.KVBlockCapacityError, ms.MambaSlotCapacityError):
            report = load_prefixes(self.engine, folder)
            self.tally.events["imports"] += report.imported.states
        self.tally.events["states exported"] += saved.states

    def _fail_at_a_point(self) -> None:
        """A call inside a step raises, before it has done its work or behind."""
        if self._rounded is not None:  # it would miss what such a step has registered
            return
        point, after = self.random.choice(POINTS), self.random.random() < 0.5
        with failing(self.engine, point, after=after) as seen, suppress(InjectedError):
            self._advance()
        self.tally.events["failed steps"] += seen["failed"]

    def _spoil(self) -> None:
        if not is_poisoned(self.engine):  # which takes NaN for a read of free memory
            super()._spoil()

    def _reset(self) -> None:
        self._note_counts()
        super()._reset()
        self.tally.events["reset"] += 1
        if self._rounded is not None:
            self._rounded.forget_all()

    def _note_counts(self) -> None:
        """What the engine counts since its last reset."""
        stats, events = self.engine.stats(), self.tally.events
        tiers = stats.cache.tiers
        events["host-tier fetches"] += tiers.num_states_fetched
        events["disk fetches"] += tiers.num_states_fetched_from_disk
        events["drafts accepted"] += stats.speculation.num_accepted
        if self.world.refuses_by_value:
            events["refused by value"] += stats.cache.num_states_refused
        events["states evicted"] += stats.cache.num_states_evicted

    def note_end(self) -> None:
        """Count what is known once the traffic is over."""
        self._note_counts()
        events = self.tally.events
        events.update(self._prompts.counts)
        events["failed copies"] += self.world.copies.num_faults if self.world.copies is not None else 0
        for count, event in (
            ("dropped", "dropped streams"), ("pins", "pinned"), ("interrupts", "interrupts"),
            ("failed forwards", "failed forwards"),
        ):  # fmt: skip
            events[event] += self.counts[count]


def run_round(seed: int, seconds: float, device: str) -> RoundTally:
    """One round; `seed` draws the model, the settings and the traffic."""
    if device == "cpu" and seed % TOY_EVERY == TOY_EVERY - 1:
        return _toy_round(seed, seconds)
    before = objects()
    tally = _serve(seed, seconds, device)
    try:
        if not tally.mismatches:  # an error's traceback holds requests
            check_objects(before)
    except LeftWrongError as error:
        tally.mismatches.append(f"engine round, seed {seed}: {error}")
    return tally


def _serve(seed: int, seconds: float, device: str) -> RoundTally:
    with TemporaryDirectory() as folder:
        engine_round = EngineRound(seed, device, Path(folder))
        try:
            engine_round.serve(seconds)
        except Exception as error:
            traceback.print_exc()
            config, operation = engine_round.engine.config, engine_round.num_operations
            said = f"engine round, seed {seed}, operation {operation}: {type(error).__name__}: {error}"
            engine_round.tally.mismatches.append(f"{said}\n  {config}")
        engine_round.note_end()
        return engine_round.tally


def _toy_round(seed: int, seconds: float) -> RoundTally:
    """Runs of `oracle.everything`."""
    totals, tally = Totals(), RoundTally()
    end, run = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        found = totals.run(1000 * seed + run)
        tally.mismatches += [f"engine round, seed {seed}, run {run}: {found}"] if found else []
        run += 1
    tally.requests = tally.comparisons = totals.num_results
    tally.events.update({"toy rounds": 1, "interrupts": totals.counts["interrupts"]})
    return tally
