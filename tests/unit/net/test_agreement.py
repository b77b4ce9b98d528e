"""Ranks as threads, each with an engine of a whole model: what they compare, and what they say."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import mambaslots as ms
import numpy as np
import pytest
import torch.distributed as dist
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.contexts.step_inputs import StepInputs
from oracle.agreement import Agreement, DisagreementError
from oracle.serving import random_tokens, run_checked, small_engine

Work = Callable[[ms.DynamicInferenceEngine, Agreement], None]


def run_ranks(
    *works: Work, store: dist.Store | None = None, timeout_s: float = 20.0, **settings: object
) -> list[BaseException | None]:
    """What each rank's work raised."""
    store = dist.HashStore() if store is None else store
    all_are_made = threading.Barrier(len(works), timeout=20.0)

    def run(rank: int) -> None:
        engine = small_engine(**settings)
        agreement = Agreement(engine.context, store.clone(), rank, len(works), timeout_s)
        all_are_made.wait()
        try:
            works[rank](engine, agreement)
        finally:
            agreement.close()
            engine.context.check_integrity()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.exception() for future in [pool.submit(run, rank) for rank in range(len(works))]]


def serve(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
    for seed in range(3):
        engine.add_request(random_tokens(21, seed % 2), ms.SamplingParams(max_tokens=6))
    run_checked(engine)
    agreement.compare()


def deciding(*decisions: str) -> Work:
    """A rank that decided this, in a process that serves nothing."""

    def work(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
        for decision in decisions:
            agreement._note(decision)
        agreement.compare()

    return work


def messages(errors: list[BaseException | None]) -> set[str]:
    for error in errors:
        assert isinstance(error, DisagreementError), error
    return {str(error) for error in errors}


def test_ranks_that_do_the_same_agree_and_leave_little_in_the_store() -> None:
    store = dist.HashStore()
    assert run_ranks(serve, serve, serve, store=store) == [None] * 3
    assert store.num_keys() == 3  # of each rank: how many it made


@pytest.mark.parametrize("ended", ["agreed", "disagreed", "gave up"])
def test_the_last_rank_to_close_leaves_nothing_but_counts_and_no_earlier_one_takes_what_others_read(
    ended: str,
) -> None:
    store, all_made = dist.HashStore(), threading.Barrier(3)

    def work(rank: int) -> Work:
        def compare(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
            all_made.wait()
            agreement.compare()
            if ended == "disagreed":
                agreement._note(str(rank))
            if ended != "gave up" or rank:
                with suppress(DisagreementError):
                    agreement.compare()
            agreement.close()
            agreement.close()

        return compare

    timeout_s = 0.5 if ended == "gave up" else 20.0
    assert run_ranks(*map(work, range(3)), store=store, timeout_s=timeout_s) == [None] * 3
    assert store.num_keys() == 3  # of each rank: how many it made


def test_a_second_agreement_over_the_same_store_starts_anew() -> None:
    store = dist.HashStore()
    for _ in range(2):
        assert run_ranks(serve, serve, store=store) == [None] * 2


@pytest.mark.parametrize(
    ("decisions", "ranks", "message"),
    [
        (("ab", "ac", "ab"), (1,), "ranks [1] differ from [0, 2] at decision 1: 'c' against 'b'"),
        (
            ("ab", "ac"),
            (0, 1),
            "ranks [0, 1] differ at decision 1: ranks [0] decided 'b', ranks [1] decided 'c'",
        ),
        (("ab", "a", "ab"), (1,), "ranks [1] differ from [0, 2] at decision 1: nothing against 'b'"),
        (("a", "a", "ab"), (2,), "ranks [2] differ from [0, 1] at decision 1: 'b' against nothing"),
        (
            ("x", "y", "z", "z"),
            (0, 1),
            "ranks [0, 1] differ from [2, 3] at decision 0: 'y' of ranks [1], 'x' of ranks [0] against 'z'",
        ),
    ],
)  # fmt: skip
def test_the_first_difference_and_the_minority_are_named(
    decisions: tuple[str, ...], ranks: tuple[int, ...], message: str
) -> None:
    def after_the_first(work: Work) -> Work:
        def both(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
            agreement.compare()
            work(engine, agreement)

        return both

    errors = run_ranks(*(after_the_first(deciding(*letters)) for letters in decisions))
    assert messages(errors) == {f"step 1: {message}"}
    for error in errors:
        assert isinstance(error, DisagreementError)
        assert (error.step, error.ranks) == (1, ranks)
        assert sorted(error.decisions) == list(range(len(decisions)))


def test_the_same_letters_cut_elsewhere_are_other_decisions() -> None:
    assert messages(run_ranks(deciding("ab", "c"), deciding("a", "bc")))


def test_a_rank_that_does_not_come_is_named_to_all_also_to_itself() -> None:
    came_late: list[str] = []

    def late(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
        while not agreement._store.check([agreement._verdict_key("digest", 0)]):
            time.sleep(0.001)
        with pytest.raises(DisagreementError) as caught:
            agreement.compare()
        came_late.append(str(caught.value))
        raise caught.value

    (message,) = messages(run_ranks(deciding("a"), late, deciding("a"), timeout_s=0.5))
    assert message.startswith("step 0: ranks [1] did not come to compare decisions within 0.5 s; ")
    assert came_late == [message]


class StoppedAtTheTimeout(dist.PrefixStore):
    """A store whose rank stands still between finding another absent and saying so."""

    def __init__(self, store: dist.Store, go_on: threading.Event) -> None:
        super().__init__("", store)
        self.found_absent, self.go_on = threading.Event(), go_on

    def check(self, keys: list[str]) -> bool:
        here = bool(super().check(keys))
        if not here:
            self.found_absent.set()
            assert self.go_on.wait(20.0)
        return here


def test_a_rank_that_comes_right_at_the_timeout_agrees_with_all_or_with_none() -> None:
    base, second_is_done = dist.HashStore(), threading.Event()
    first_store = StoppedAtTheTimeout(base, second_is_done)

    def compare(rank: int) -> None:
        store = dist.PrefixStore("", base) if rank else first_store
        agreement = Agreement(small_engine().context, store, rank, 2, 20.0 if rank else 0.1)
        try:
            if rank:
                assert first_store.found_absent.wait(20.0)
            agreement.compare()
        finally:
            if rank:
                second_is_done.set()

    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(compare, rank) for rank in range(2)]]
    assert errors == [None] * 2


def test_ranks_that_come_near_the_timeout_all_say_the_same() -> None:
    contexts, store = [small_engine().context for _ in range(3)], dist.HashStore()
    random, outcomes = np.random.default_rng(3), set()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(100):
            agreements = [Agreement(context, store, r, 3, 0.01) for r, context in enumerate(contexts)]
            delays = random.uniform(0.0, 0.02, 3)

            def compare(rank: int, agreements=agreements, delays=delays) -> str:  # type: ignore[no-untyped-def]
                time.sleep(delays[rank])
                try:
                    agreements[rank].compare()
                except DisagreementError as error:
                    return str(error)
                return "agreed"

            said = set(pool.map(compare, range(3)))
            assert len(said) == 1, said
            outcomes |= said
            for agreement in agreements:
                agreement.close()
    assert len(outcomes) > 1, "some should come in time, and some not"
    assert store.num_keys() == 3


def test_after_a_disagreement_every_step_says_so_again_until_both_begin_anew() -> None:
    store = dist.HashStore()

    def stubborn(count: int) -> Work:
        def work(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
            for seed in range(count):
                engine.add_request(random_tokens(12, seed), ms.SamplingParams(max_tokens=2))
            first = None
            for _ in range(3):
                with pytest.raises(DisagreementError) as caught:
                    engine.step()
                first = first or str(caught.value)
                assert str(caught.value) == first
                engine.context.check_integrity()
            agreement.close()
            fresh = small_engine()  # in the old ones equal requests have other ids from now on
            serve(fresh, Agreement(fresh.context, agreement._store, agreement._rank, 2))

        return work

    assert run_ranks(stubborn(1), stubborn(2), store=store) == [None] * 2


def test_the_tokens_of_the_very_last_step_are_compared_when_asked_to() -> None:
    def answer(added: int) -> Work:
        def work(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
            # A prompt without a whole block: its token is read after the step is registered.
            request_id = engine.add_request(random_tokens(5, 0), ms.SamplingParams(max_tokens=1))
            request = engine.core.requests[request_id]
            engine.step()
            request.tokens[-1] = 100 + added
            agreement.compare()

        return work

    (message,) = messages(run_ranks(answer(0), answer(1)))
    assert message == (
        "step 1: ranks [0, 1] differ at decision 1: ranks [0] decided 'token 0 of request 0 is 100', "
        "ranks [1] decided 'token 0 of request 0 is 101'"
    )


def test_an_observer_is_called_at_each_step_and_fails_it_by_raising() -> None:
    class Observer:
        def __init__(self) -> None:
            self.chunks: list[tuple[str, int, int]] = []

        def step_begun(self, chunks: Sequence[ScheduledRequest], inputs: StepInputs) -> None:
            self.chunks += [("begun", chunk.start, chunk.stop) for chunk in chunks]
            assert engine.context.batch == tuple(chunks)
            assert inputs.shape.rows == len(chunks)
            if len(self.chunks) == 3:
                raise LookupError("not this step")

        def step_ended(self, chunks: Sequence[ScheduledRequest]) -> None:
            self.chunks += [("ended", chunk.start, chunk.stop) for chunk in chunks]
            assert not engine.context.batch

    engine, observer = small_engine(), Observer()
    engine.context.observers.append(observer)
    engine.add_request(random_tokens(9, 0), ms.SamplingParams(max_tokens=3))
    engine.step()
    with pytest.raises(LookupError, match="not this step"):
        engine.step()
    engine.context.check_integrity()
    engine.step()  # it restarts from the state at 8
    engine.context.observers.remove(observer)
    engine.step()
    assert observer.chunks == [
        ("begun", 0, 9), ("ended", 0, 9), ("begun", 9, 10), ("begun", 8, 10), ("ended", 8, 10),
    ]  # fmt: skip


def test_without_prefix_caching_too() -> None:
    assert run_ranks(serve, serve, enable_prefix_caching=False) == [None] * 2


def test_a_closed_agreement_follows_nothing() -> None:
    engine = small_engine()
    agreement = Agreement(engine.context, dist.HashStore(), 0, 2)
    agreement.close()
    agreement.close()
    engine.generate([random_tokens(9, 0)])
    engine.reset_prefix_cache()
    assert not agreement._decisions
    assert not engine.context.observers
    assert not engine.context.prefix_cache.kv_blocks._observers


def test_steps_that_are_padded_otherwise_are_other_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def padding(blocks: int) -> Work:
        def work(engine: ms.DynamicInferenceEngine, agreement: Agreement) -> None:
            begin = engine.context.begin_step
            wider = lambda shape: shape._replace(block_columns=shape.block_columns + blocks)  # noqa: E731
            monkeypatch.setattr(engine.context, "begin_step", lambda chunks, *_: begin(chunks, wider))
            serve(engine, agreement)

        return work

    (message,) = messages(run_ranks(padding(0), padding(1), padding(0)))
    assert "ranks [1] differ from [0, 2]" in message
    assert "'step of shape StepShape(decodes=0, prefills=" in message
