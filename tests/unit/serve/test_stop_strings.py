"""Stop strings, against a search that looks at every beginning of the text."""

from hypothesis import given
from hypothesis import strategies as st
from mambaslots.serve.stop_strings import StopStrings
from oracle.stops import cut_by_force, num_undecided

few_letters = st.text("ab€", max_size=30)
stop_strings = st.lists(st.text("ab€", min_size=1, max_size=6), max_size=4)


@given(st.lists(few_letters, max_size=8), stop_strings)
def test_the_text_before_the_first_stop_string_is_returned(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    whole, returned = "", ""
    for piece in pieces:
        whole += piece
        returned += matcher.push(piece)
        expected, found = cut_by_force(whole, stops)
        assert matcher.found == found
        kept = 0 if found else num_undecided(whole, stops)
        assert returned == expected[: len(expected) - kept]
        assert matcher.num_returned == len(returned)
    returned += matcher.finish()
    assert (returned, matcher.found) == cut_by_force(whole, stops)
    assert matcher.num_returned == len(returned)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopStrings(["stop"])
    assert [matcher.push(piece) for piece in ("a s", "to", "p b", " c")] == ["a ", "", "", ""]
    assert matcher.found
    assert matcher.finish() == ""


def test_of_two_that_end_together_the_longer_counts() -> None:
    matcher = StopStrings(["b", "aab"])
    assert [matcher.push("xaab"), matcher.finish()] == ["x", ""]
