"""The text of an answer and its tokens, for tokens of bytes that come in groups of any size."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from mambaslots.params_and_results import GeneratedToken
from mambaslots.serve.answer_text import AnswerDelta, AnswerText, AnswerToken, StopStrings
from mambaslots.text import ByteTokenizer, TextCodec
from oracle.stops import cut_by_force, num_undecided

CODEC = TextCodec(ByteTokenizer({"<|end|>": 256}))


@st.composite
def groups_of_tokens(draw: st.DrawFn) -> list[list[int]]:
    """Bytes of a text, some of other texts and special tokens, in groups."""
    tokens = list(draw(st.text("ab€é", max_size=20)).encode())
    for token in draw(st.lists(st.sampled_from([0xE2, 0x82, 0xFF, 256]), max_size=3)):
        tokens.insert(draw(st.integers(0, len(tokens))), token)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


@given(groups_of_tokens(), st.lists(st.text("ab€é\ufffd", min_size=1, max_size=4), max_size=4), st.booleans())
def test_pieces_are_the_text_before_the_stop(groups: list[list[int]], stops: list[str], keeps: bool) -> None:
    answer = AnswerText(CODEC, stops, previous_token=0, keeps_tokens=keeps)
    pieces, num_pushed = [], 0
    for group in groups:
        if answer.has_stopped:
            break
        pieces.append(answer.push([GeneratedToken(token, -float(token)) for token in group]))
        num_pushed += len(group)
    pieces.append(answer.finish())
    text = "".join(piece.text for piece in pieces)
    all_tokens = [token for group in groups for token in group]
    expected, found = cut_by_force(CODEC.decode(all_tokens), stops)
    assert (text, answer.has_stopped) == (expected, found)
    tokens = [token for piece in pieces for token in piece.tokens]
    ids = [token.token for token in tokens]
    assert ids == (all_tokens[: len(ids)] if keeps else [])
    assert [token.log_prob for token in tokens] == [-float(token) for token in ids]
    if keeps and not found:
        assert ids == all_tokens
    if found:
        assert answer.num_tokens <= num_pushed
        assert expected.startswith(CODEC.decode(ids).rstrip("\ufffd"))  # no token reaches into the stop


def test_a_model_without_a_tokenizer_answers_with_token_ids() -> None:
    answer = AnswerText(None, (), previous_token=0, keeps_tokens=True)
    piece = answer.push([GeneratedToken(7, None), GeneratedToken(9, None)])
    assert piece.text == ""
    assert [token.token for token in piece.tokens] == [7, 9]
    assert answer.finish().tokens == []


class Words:
    """A tokenizer that drops the blank at the beginning of a text, as sentencepiece does."""

    words = ("<s>", " Hello", " world", "s")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Any) -> str:
        return "".join(self.words[token] for token in token_ids if token).removeprefix(" ")


def test_a_token_s_text_has_the_blank_before_it() -> None:
    answer = AnswerText(TextCodec(Words()), (), previous_token=1, keeps_tokens=True)
    piece = answer.push([GeneratedToken(token, -0.5) for token in (2, 3, 1)])
    assert piece.text == "worlds Hello"
    assert piece.tokens == [
        AnswerToken(2, " world", 0, -0.5), AnswerToken(3, "s", 5, -0.5), AnswerToken(1, " Hello", 6, -0.5),
    ]  # fmt: skip
    begun = AnswerText(TextCodec(Words()), (), previous_token=0, keeps_tokens=True)
    pushed = begun.push([GeneratedToken(token, -0.5) for token in (1, 2, 0)]), begun.finish()
    assert [token.text for token in AnswerDelta.joined(pushed).tokens] == ["Hello", " world", ""]


# ---- stop strings, against a search that looks at every beginning of the text

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
        assert matcher.is_found == found
        kept = 0 if found else num_undecided(whole, stops)
        assert returned == expected[: len(expected) - kept]
        assert matcher.num_returned == len(returned)
    returned += matcher.finish()
    assert (returned, matcher.is_found) == cut_by_force(whole, stops)
    assert matcher.num_returned == len(returned)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopStrings(["stop"])
    assert [matcher.push(piece) for piece in ("a s", "to", "p b", " c")] == ["a ", "", "", ""]
    assert matcher.is_found
    assert matcher.finish() == ""


def test_of_two_that_end_together_the_longer_counts() -> None:
    matcher = StopStrings(["b", "aab"])
    assert [matcher.push("xaab"), matcher.finish()] == ["x", ""]
