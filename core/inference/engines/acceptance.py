"""Which drafts are accepted, given the tokens that the model draws.

At each position a token is drawn as plain decoding draws it: from the model's distribution p (after
temperature, top-k and top-p) with the random number of that position. A draft is accepted if it equals the
drawn token, which happens with probability p(draft). Otherwise the drawn token is distributed as p without
the draft, renormalised. This is speculative sampling (Leviathan et al. 2023, arXiv 2211.17192) where the
drafts' distribution q is a point mass. The tokens are also the same as those of plain decoding, not only
equally distributed. Greedy decoding is the case where p is a point mass, too.
"""

from collections.abc import Collection, Sequence


def accepted_tokens(drafts: Sequence[int], drawn: Sequence[int], stops: Collection[int | None]) -> list[int]:
    """A request's new tokens: `drawn` up to the first token that differs from its draft or ends the answer.

    Args:
        drafts: the drafted tokens.
        drawn: one token more than `drafts`. `drawn[i]` was drawn from the distribution after `drafts[:i]`,
            and counts if all of `drafts[:i]` are accepted.
        stops: tokens that end the answer.
    """
    tokens: list[int] = []
    for i, token in enumerate(drawn):
        tokens.append(token)
        if token in stops or i == len(drafts) or token != drafts[i]:
            break
    return tokens


def count_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of `tokens`, a result of `accepted_tokens`, had been drafted."""
    return sum(draft == token for draft, token in zip(drafts, tokens, strict=False))
