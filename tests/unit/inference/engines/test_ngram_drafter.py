"""Prompt lookup in the last tokens of a request: the drafts, what a call reads, and what it keeps."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, TokenView
from oracle.context_driver import make_request
from oracle.faults import InjectedError, failing
from oracle.serving import random_tokens, small_engine

LARGEST = 2**31 - 1


def expected_drafts(
    tokens: Sequence[int], most: int, shortest: int = 2, longest: int = 4, window: int = 65_536
) -> list[int]:
    """Brute force: every length and every start among the last `window` tokens."""
    text = list(tokens[-window:])
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        found = [i for i in range(len(text) - length) if text[i : i + length] == text[-length:]]
        if found:
            follows = found[-1] + length
            drafts = text[follows:]
            while len(drafts) < most:
                drafts += text[follows:]
            return drafts[:most]
    return []


ids = st.sampled_from([0, 1, 2, 256, 65_536, LARGEST])
pieces = st.lists(ids, max_size=12)
changes = st.lists(st.tuples(st.integers(0, 5), pieces), max_size=20)
windows = st.sampled_from([1, 2, 5, 8, 63, 64, 65, 65_536])


@given(st.lists(ids, min_size=1, max_size=150), changes, st.integers(1, 4), st.integers(0, 3), windows)
def test_drafts_are_those_of_brute_force_while_tokens_come_and_are_cut_back(
    prompt: list[int], changes: list[tuple[int, list[int]]], shortest: int, more: int, window: int
) -> None:
    drafter = ms.NgramDrafter(shortest + more, shortest, window)
    request = make_request(prompt)
    for num_cut, new in changes:
        request.cut_to(max(len(prompt), len(request.tokens) - num_cut))
        request.append(new, [None] * len(new), 0.0)
        expected = expected_drafts(request.tokens, 5, shortest, shortest + more, window)
        assert drafter.draft(request.token_view, 5) == expected
        assert drafter.draft(list(request.tokens), 5) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("num_new", [1, 5, 700, 1500])
@pytest.mark.parametrize("num_ids", [2, 40, 5000])
def test_drafts_are_those_of_brute_force_over_several_windows(num_new: int, num_ids: int) -> None:
    drafter, window = ms.NgramDrafter(window=500), 500
    text = [token * num_ids // 256 for token in random_tokens(4000, seed=1)]
    tokens = text[:30]
    view = TokenView(tokens)
    while len(tokens) < len(text):
        tokens += text[len(tokens) : len(tokens) + num_new]
        if num_new > 1 or len(tokens) % 7 == 0:
            assert drafter.draft(view, 3) == expected_drafts(tokens, 3, window=window)


def test_sequences_of_no_or_one_token_have_no_drafts() -> None:
    request = make_request([7])
    drafter = ms.NgramDrafter(2, 1)
    assert drafter.draft([], 2) == []
    assert drafter.draft(TokenView([]), 2) == []
    assert drafter.draft(request.token_view, 2) == []
    request.append([7], [None], 0.0)
    assert drafter.draft(request.token_view, 2) == [7, 7]


@pytest.mark.parametrize("window", [0, -1, 1.5, "8", 2**31])
def test_the_window_is_checked(window: object) -> None:
    with pytest.raises(ValueError, match=r"window is .*; accepted: an integer from 1 to"):
        ms.NgramDrafter(window=window)  # type: ignore[arg-type]


# ---- costs


class CountedView(TokenView):
    """Counts what is read of it."""

    num_read = 0

    def __getitem__(self, index: int | slice) -> int | list[int]:  # type: ignore[override]
        part = super().__getitem__(index)
        self.num_read += len(part) if isinstance(part, list) else 1
        return part

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a drafter need not read everything")


def texts(length: int) -> dict[str, list[int]]:
    straddling = [0x01000000, 0x00000001, 0x00010000, 0x00000100]  # the same bytes at other places
    return {
        "random": [i * 2654435761 % 50_021 for i in range(length)],
        "one id": [5] * length,
        "two ids": [token % 2 for token in random_tokens(length, seed=3)],
        "ids that straddle": [straddling[i * i % 7 % 4] for i in range(length)],
        "a suffix that almost occurs": [*([1, 2, 3] * length)[:length], 2, 2, 3],
    }


@pytest.mark.parametrize("text", list(texts(1)))
def test_a_call_reads_what_is_new_however_long_the_context_is(text: str) -> None:
    counts = []
    for length in (1_100, 40_000):
        tokens = texts(length)[text]
        view, drafter = CountedView(tokens), ms.NgramDrafter()
        for new in ([95, 91, 92], [96, 91, 92], [95, 96, 91, 92]):  # each time a longer suffix is looked up
            tokens += new
            drafter.draft(view, 4)
        before = view.num_read
        for start in range(400, 420):
            tokens += tokens[start : start + 2]
            drafter.draft(view, 4)
        counts.append(view.num_read - before)
    assert counts[1] <= 20 * 100
    assert counts[1] <= 1.5 * counts[0]


def test_what_has_left_the_window_is_gone() -> None:
    """What is kept stays below two windows, and an occurrence before the window is not found."""
    tokens = [1, 2, 3, *range(100, 160)]
    view, drafter = TokenView(tokens), ms.NgramDrafter(window=64)
    assert drafter.draft(view, 1) == []
    for token in range(1000, 3000):
        tokens.append(token)
        drafter.draft(view, 1)
    tokens += [1, 2]
    assert drafter.draft(view, 1) == []
    assert expected_drafts(tokens, 1) == [3]
    (kept,) = drafter._indexes.values()
    assert 64 <= len(kept.ids) < 2 * 64


def test_an_index_goes_with_its_request() -> None:
    engine = small_engine(num_speculative_tokens=3)
    drafter = engine.core._drafter
    assert isinstance(drafter, ms.NgramDrafter)
    prompts = [[i, 2, 3, 4] * 3 for i in range(3)]
    params = ms.SamplingParams(max_tokens=6)
    gc.disable()  # references alone must do
    try:
        for prompt in prompts:
            engine.add_request(prompt, params)
        engine.step()
        engine.step()
        assert len(drafter._indexes) == 3
        while engine.has_unfinished_requests():
            engine.step()
        assert len(drafter._indexes) == 0
    finally:
        gc.enable()


# ---- the view


def test_a_view_shows_the_tokens_and_cannot_be_written() -> None:
    request = make_request([3, 1, 4, 1, 5])
    view = request.token_view
    assert request.token_view is view
    assert isinstance(view, Sequence)
    assert (len(view), view[0], view[-1], view[1:3]) == (5, 3, 5, [1, 4])
    assert list(view) == [3, 1, 4, 1, 5]
    assert list(reversed(view)) == [5, 1, 4, 1, 3]
    assert (view.index(4), view.count(1)) == (2, 2)
    assert 4 in view
    assert 9 not in view
    assert repr(view) == "TokenView([3, 1, 4, 1, 5])"
    for name in ("append", "extend", "pop", "clear", "__setitem__", "__delitem__", "__iadd__", "sort"):
        assert not hasattr(view, name)
    view[1:3].append(7)
    view[:].clear()
    assert request.tokens == [3, 1, 4, 1, 5]
    assert weakref.ref(view)() is view
    assert {view: 1, TokenView([3, 1, 4, 1, 5]): 2}[view] == 1


def test_a_view_only_grows() -> None:
    request = make_request([1, 2, 3])
    view = request.token_view
    request.append([4, 5], [None, None], 0.0)
    assert list(view) == [1, 2, 3, 4, 5]
    request.cut_to(5)
    assert request.token_view is view
    request.cut_to(4)
    request.append([9], [None], 0.0)
    assert list(view) == [1, 2, 3, 4, 5]
    assert list(request.token_view) == request.tokens == [1, 2, 3, 4, 9]


class Vandal:
    """A drafter that tries to write into what it gets."""

    def __init__(self) -> None:
        self.num_refused = 0

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        for deed in (
            lambda: tokens.append(1),  # type: ignore[attr-defined]
            lambda: tokens.clear(),  # type: ignore[attr-defined]
            lambda: tokens.__setitem__(0, 1),  # type: ignore[attr-defined]
        ):
            try:
                deed()
            except AttributeError:
                self.num_refused += 1
        tokens[:].clear()  # type: ignore[attr-defined]
        return list(tokens[:max_drafts])


def test_a_drafter_cannot_change_a_request() -> None:
    prompt, params = random_tokens(20, seed=1), ms.SamplingParams(max_tokens=8)
    vandal = Vandal()
    engine = small_engine(num_speculative_tokens=2, make_drafter=lambda: vandal)
    (result,) = engine.generate([prompt], params)
    assert result.tokens == small_engine().generate([prompt], params)[0].tokens
    assert vandal.num_refused >= 3


class Compared(ms.NgramDrafter):
    """Holds every draft against brute force."""

    num_calls = 0

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        drafts = super().draft(tokens, max_drafts)
        assert drafts == expected_drafts(tokens, max_drafts, self.shortest, self.longest, self.window)
        self.num_calls += 1
        return drafts


@pytest.mark.sampled(point=("advance", "leaving"))
@pytest.mark.parametrize("point", ["waited", "end", "advance", "leaving"])
def test_drafts_stay_right_where_steps_fail(point: str) -> None:
    drafter = Compared(3, 1, window=24)
    engine = small_engine(num_speculative_tokens=3, make_drafter=lambda: drafter)
    prompts = [[1, 2, 3, 1, 2] * 4, random_tokens(21, seed=2)]
    params = ms.SamplingParams(max_tokens=20)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    results: dict[int, ms.RequestResult] = {}
    for number in range(200):
        if not engine.has_unfinished_requests():
            break
        if number % 3 == 2:
            with failing(engine, point, after=True) as seen:
                try:
                    report = engine.step()
                except InjectedError:
                    continue
                assert not seen["failed"]
        else:
            report = engine.step()
        results |= {result.request_id: result for result in report.finished}
    plain = small_engine().generate(prompts, params)
    assert [results[request].tokens for request in requests] == [result.tokens for result in plain]
    assert drafter.num_calls > 10


def test_a_request_without_drafts_makes_no_view() -> None:
    engine = small_engine()
    request_id = engine.add_request([1, 2, 3])
    request: DynamicInferenceRequest = engine.core.requests[request_id]
    engine.step()
    engine.step()
    assert request._token_view is None


def test_a_view_equals_lists_of_its_tokens_and_no_other_view() -> None:
    tokens = [1, 2, 3]
    view, other = TokenView(tokens), TokenView(tokens)
    assert view == tokens == view[:]
    assert view == (1, 2, 3)
    assert tokens[:2] == view[:2]
    assert view != [1, 2]
    assert view != other
    assert view == view
    assert len({view, other}) == 2
