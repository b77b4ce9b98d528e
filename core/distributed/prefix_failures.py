"""What went wrong on the ranks of a replica, in one text that is the same on all of them."""

from collections.abc import Sequence


def described(error: BaseException) -> str:
    return str(error) or type(error).__name__


def failures(reasons: Sequence[str]) -> str:
    """The ranks that failed and why, in one text; empty where none did. A rank without a reason did not."""
    if len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"rank {rank} of the replica: {reason}" for rank, reason in enumerate(reasons) if reason)


def differences(what: str, told: Sequence[object]) -> str:
    """The ranks that told something else than rank 0, of `what`; empty where all told the same."""
    others = [rank for rank, value in enumerate(told) if value != told[0]]
    if not others:
        return ""
    return f"ranks {others} of the replica have other {what} than rank 0; accepted: the same on all"
