"""How soon requests come back to a state of each class, learned from the requests so far."""

from collections.abc import Sequence

AGE_BOUNDS = (
    0, 1, 2, 3,
    *(bound for exponent in range(2, 14) for bound in (2**exponent, 3 * 2 ** (exponent - 1))),
)  # fmt: skip
"""Ages, in numbers of requests, at which the buckets begin; the last bucket has no end."""
NUM_BUCKETS = len(AGE_BOUNDS)
_STOPS = (*AGE_BOUNDS[1:], 2 * AGE_BOUNDS[-1])
_WIDTHS = tuple(stop - start for start, stop in zip(AGE_BOUNDS, _STOPS, strict=True))
_BUCKETS = tuple(zip(AGE_BOUNDS, _WIDTHS, strict=True))
_PRIOR_STATES = 2.0
RATE_SCALE = 1 << 40
"""A rate of 1 use a request is this integer, so that sums of rates are exact on every rank."""


class UseRates:
    """For each class of states and each bucket of ages the best rate of use per request of waiting.

    The hazard of a bucket is uses / requests waited, over all states of the class that were ever in it. The
    rate of a state is its Gittins index: the maximum, over how long one waits, of P(use within the wait) /
    E(requests until the use or the end of the wait). (J. C. Gittins, Bandit Processes and Dynamic Allocation
    Indices, 1979.)
    """

    def __init__(self, prior_weights: Sequence[float]) -> None:
        self.uses = [
            [_PRIOR_STATES * width * weight / (start + 2) for start, width in _BUCKETS]
            for weight in prior_weights
        ]
        self.waits = [[_PRIOR_STATES * width for width in _WIDTHS] for _ in prior_weights]
        self.rates = [[0] * NUM_BUCKETS for _ in prior_weights]
        self.refresh()

    def refresh(self) -> None:
        """Compute all rates anew; O(classes x buckets^2)."""
        for uses, waits, rates in zip(self.uses, self.waits, self.rates, strict=True):
            spans = [
                (use / wait, width / (1 + use / wait * width))
                for use, wait, width in zip(uses, waits, _WIDTHS, strict=True)
            ]
            for bucket in range(NUM_BUCKETS):
                rates[bucket] = int(RATE_SCALE * _gittins(spans[bucket:]))


def _gittins(spans: Sequence[tuple[float, float]]) -> float:
    """The maximum of P / E over all horizons; `spans`: (hazard, expected wait) of each bucket from now on."""
    best = used = waited = 0.0
    alive = 1.0
    for hazard, wait in spans:
        used += alive * hazard * wait
        waited += alive * wait
        if used > best * waited:
            best = used / waited
        alive *= 1 - hazard * wait
        if alive < 1e-3:
            break
    return best
