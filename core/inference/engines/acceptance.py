"""Which drafts stand, once the model has been asked.

A draft is a point mass, so verifying it needs no random number of its own: at each position a token is
*drawn* as plain decoding draws it, from the model's distribution p there (after temperature, top-k and top-p)
with the random number of that position, and the draft stands if it is the token drawn. That happens with
probability p(draft); else what was drawn is distributed as p without the draft, renormalised. This is
speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, with q a point mass), and more: the tokens are
not only distributed as those of plain decoding, they are the same. Greedy: p is a point mass too.
"""

from collections.abc import Collection, Sequence


def accepted_tokens(drafts: Sequence[int], drawn: Sequence[int], stops: Collection[int | None]) -> list[int]:
    """The new tokens of a request: of `drawn`, those up to the first that its draft does not equal.

    `drawn[i]` was drawn from the distribution after `drafts[:i]`: there is one more of them than drafts, and
    it counts as long as all drafts before it stand. Ends with the first of `stops`.
    """
    tokens: list[int] = []
    for i, token in enumerate(drawn):
        tokens.append(token)
        if token in stops or i == len(drafts) or token != drafts[i]:
            break
    return tokens


def count_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of `tokens`, as `accepted_tokens` gave them, had been drafted."""
    return sum(draft == token for draft, token in zip(drafts, tokens, strict=False))
