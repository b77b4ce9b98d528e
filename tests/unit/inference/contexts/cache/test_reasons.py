"""Why prompt tokens are computed, the counts of them, and the ghosts of what was evicted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.block_tree import GhostList
from mambaslots.inference.contexts.cache.cached_states import Span, compute_spans
from mambaslots.inference.contexts.cache.pool_stats import COMPUTE_REASONS
from mambaslots.inference.contexts.dynamic_request import TokenLedger


@st.composite
def matches(draw):
    """What a match found, in blocks, of a prompt of 1 to 40 tokens."""
    size = draw(st.integers(1, 4))
    num_tokens = draw(st.integers(1, 40))
    whole = num_tokens // size
    num_seen = draw(st.integers(0, whole))
    num_matched = draw(st.integers(0, num_seen))
    num_reachable = min(num_matched, (num_tokens - 1) // size)
    ghosts = draw(
        st.dictionaries(st.integers(1, whole + 1), st.sampled_from(["state", "refused state", "block"]))
    )
    return {
        "hashes": list(range(1, whole + 1)),
        "num_resumed": draw(st.integers(0, num_reachable)),
        "num_reachable": num_reachable,
        "num_matched": num_matched,
        "num_seen": num_seen,
        "num_tokens": num_tokens,
        "block_size_tokens": size,
        "ghosts": ghosts,
    }


def spans_of(match):
    ghosts = GhostList(100)
    for key, fact in match["ghosts"].items():
        ghosts.add_all([key], fact)
    return compute_spans(**match | {"ghosts": ghosts})


def reason_of(token, match):
    """The reason for one token, by looking at everything."""
    depth = token // match["block_size_tokens"] + 1  # blocks up to and with the token's
    hashes, reachable = match["hashes"], match["num_reachable"]
    facts = {"state": "state_evicted", "refused state": "capacity"}
    lost = [
        fact for d in range(depth, reachable + 1) if (fact := match["ghosts"].get(hashes[d - 1])) in facts
    ]
    if lost:
        return facts[lost[-1]]
    follows_to_the_end = match["num_seen"] == len(hashes)
    if depth <= reachable:
        return "state_not_taken" if follows_to_the_end else "branch_first_seen"
    if depth <= match["num_matched"]:
        return "last_token"
    if depth <= match["num_seen"]:
        return "kv_evicted"
    return "partial_block" if follows_to_the_end else "never_seen"


@given(matches())
def test_every_computed_token_has_the_reason_that_a_look_at_everything_gives(match):
    reasons = [(token, span.reason) for span in spans_of(match) for token in range(span.start, span.stop)]
    first = match["num_resumed"] * match["block_size_tokens"]
    assert reasons == [(token, reason_of(token, match)) for token in range(first, match["num_tokens"])]


@given(matches(), st.integers(1, 3), st.integers(0, 3))
def test_blocks_after_the_tokens_change_no_reason(match, num_seen, num_matched):
    whole = len(match["hashes"])
    longer = match | {"hashes": [*match["hashes"], *range(whole + 1, whole + 4)]}
    if match["num_seen"] == whole:
        longer["num_seen"] += num_seen
    if match["num_matched"] == whole:
        longer["num_matched"] += min(num_matched, num_seen)
    assert spans_of(longer) == spans_of(match)


@given(matches())
def test_spans_are_not_empty_and_name_known_reasons(match):
    for span in spans_of(match):
        assert span.start < span.stop
        assert span.reason in COMPUTE_REASONS


@st.composite
def prompts_in_steps(draw):
    """A prompt computed in steps, restarts among them: (resumed_from, start, stop) of each step."""
    num_prompt = draw(st.integers(1, 30))
    length = num_prompt + draw(st.integers(0, 10))
    steps, done = [], 0
    for _ in range(draw(st.integers(1, 8))):
        if done and draw(st.integers(0, 3)) == 0:
            done = 0  # preempted
        if done == length:
            break
        start = draw(st.integers(done, length - 1))
        stop = draw(st.integers(start + 1, length))
        steps.append((done, start, stop))
        done = stop
    cuts = sorted(draw(st.lists(st.integers(0, num_prompt), max_size=4)))
    edges = [0, *cuts, num_prompt]
    reasons = draw(
        st.lists(st.sampled_from(COMPUTE_REASONS), min_size=len(edges) - 1, max_size=len(edges) - 1)
    )
    spans = [Span(a, b, why) for a, b, why in zip(edges, edges[1:], reasons, strict=False) if a < b]
    return num_prompt, steps, spans


@given(prompts_in_steps())
def test_every_prompt_token_is_counted_once_on_the_first_way_through(case):
    num_prompt, steps, spans = case
    ledger, furthest = TokenLedger(), 0
    resumed, recomputed, computed = 0, 0, Counter()
    why = {token: span.reason for span in spans for token in range(span.start, span.stop)}
    for resumed_from, start, stop in steps:
        ledger += TokenLedger.of_step(
            range(resumed_from, start), range(start, stop), spans, furthest, num_prompt
        )
        resumed += sum(1 for token in range(resumed_from, start) if furthest <= token < num_prompt)
        recomputed += sum(1 for token in range(start, stop) if token < furthest)
        computed.update(why[token] for token in range(start, stop) if furthest <= token < num_prompt)
        furthest = max(furthest, stop)
    assert (ledger.resumed, ledger.recomputed, +ledger.computed) == (resumed, recomputed, +computed)
    assert ledger.num_prompt_tokens == min(furthest, num_prompt)
    assert ledger.counts()["num_computed_tokens"] == computed.total()


def test_counts_by_reason_name_every_reason():
    ledger = TokenLedger(computed=Counter({"never_seen": 3}))
    assert ledger.by_reason() == dict.fromkeys(COMPUTE_REASONS, 0) | {"never_seen": 3}


def test_a_ghost_remembers_all_that_is_gone():
    ghosts = GhostList(2)
    ghosts.add_all([5], "state")
    ghosts.add_all([5], "block")
    assert (ghosts.has(5, "state"), ghosts.has(5, "block"), ghosts.has(5, "continuation")) == (
        True,
        True,
        False,
    )
    assert not ghosts.has(6, "block")


def test_the_latest_reason_of_a_state_counts():
    ghosts = GhostList(2)
    ghosts.add_all([5], "state")
    ghosts.add_all([5], "refused state")
    assert (ghosts.has(5, "state"), ghosts.has(5, "refused state"), len(ghosts)) == (False, True, 1)


def test_the_oldest_ghosts_are_forgotten_first_and_together():
    ghosts = GhostList(2)
    for key in (1, 2, 1, 3):
        ghosts.add_all([key], "state")
    assert [ghosts.has(key, "state") for key in (1, 2, 3)] == [True, False, True]


def test_ghosts_of_states_can_be_discarded_and_all_cleared():
    ghosts = GhostList(3)
    ghosts.add_all([1, 2], "state")
    ghosts.add_all([2], "block")
    ghosts.remove_states([1, 2, 9])
    assert (len(ghosts), ghosts.has(2, "block"), ghosts.has(2, "state")) == (1, True, False)
    ghosts.clear()
    assert len(ghosts) == 0


def test_a_list_without_room_remembers_nothing():
    ghosts = GhostList(0)
    ghosts.add_all([1], "state")
    assert len(ghosts) == 0


@given(
    capacity=st.integers(0, 4),
    calls=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4, unique=True)), max_size=30
    ),
)
def test_the_most_recent_are_remembered(capacity, calls):
    """At least `capacity` of them, however many are added at once, and not many more."""
    ghosts, recent, known_once, most = GhostList(capacity), [], set(), 0
    for add, keys in calls:
        recent = [other for other in recent if other not in keys]
        known_once -= set(keys)
        if add:
            ghosts.add_all(keys, "state")
            recent = [*recent, *keys][-capacity:] if capacity else []
            known_once |= set(keys)
        else:
            ghosts.remove_states(keys)
        known = {key for key in range(10) if ghosts.has(key, "state")}
        most = max(most, len(keys))
        assert len(ghosts) == len(known) <= 2 * (capacity + most)
        assert bool(ghosts) == bool(known)
        assert set(recent) <= known <= known_once
