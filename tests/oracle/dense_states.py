"""A model that keeps the state after every token of every sequence: what align mode must find again.

A state is one number, chained from the state before and the token, so that it names the whole sequence behind
it; a convolution's window is the last tokens themselves. Integers, so that equal means equal.
"""

import numpy as np

HISTORY = 3
"""Tokens before the newest that a convolution reads: its kernel - 1."""
NO_TOKEN = -1


def next_state(state, token):
    """[n] uint64 states after one more token each; products wrap."""
    return (state * np.uint64(6364136223846793005) + token.astype(np.uint64)) ^ (state >> np.uint64(29))


class DenseStates:
    """`count` sequences of random tokens [count, length], and the state after every prefix of each.

    states: [count, length + 1] uint64; windows: [count, length + 1, HISTORY], the tokens before, NO_TOKEN
    before the first.
    """

    def __init__(self, generator, count, length):
        self.tokens = generator.integers(0, 1 << 30, (count, length))
        self.states = np.zeros((count, length + 1), dtype=np.uint64)
        for place in range(length):
            self.states[:, place + 1] = next_state(self.states[:, place], self.tokens[:, place])
        padded = np.concatenate([np.full((count, HISTORY), NO_TOKEN), self.tokens], axis=1)
        self.windows = np.lib.stride_tricks.sliding_window_view(padded, HISTORY, axis=1)


class DenseForward:
    """A forward that reads and writes states at given pool indices.

    ssm: [slots] uint64; conv: [slots, HISTORY + K], poisoned at first.
    """

    def __init__(self, generator, slots, drafts):
        self.ssm = generator.integers(0, 1 << 62, slots).astype(np.uint64)
        self.conv = generator.integers(0, 1 << 62, (slots, HISTORY + drafts))

    def read(self, indices):
        """(states [n], windows [n, HISTORY]) before the tokens; zeros and no tokens for source -1."""
        states = np.where(indices.ssm_sources < 0, np.uint64(0), self.ssm[indices.ssm_sources])
        places = indices.conv_offsets[:, None] + np.arange(HISTORY)
        windows = self.conv[indices.conv_sources[:, None], places]
        return states, np.where(indices.conv_sources[:, None] < 0, NO_TOKEN, windows)

    def decode(self, indices, tokens, counts):
        """Up to 1 + K tokens [n, 1 + K], `counts` [n] of them, each of whose states is kept."""
        state, window = self.read(indices)
        inputs = np.concatenate([window, tokens], axis=1)[:, 1:]
        for place in range(indices.ssm_destinations.shape[1]):
            state = next_state(state, tokens[:, place])
            to = indices.ssm_destinations[:, place]
            self.ssm[to[to >= 0]] = state[to >= 0]
        for row in np.flatnonzero(indices.conv_destinations >= 0):
            written = HISTORY - 1 + counts[row]
            self.conv[indices.conv_destinations[row], :written] = inputs[row, :written]

    def prefill(self, indices, states, windows):
        """Many tokens, whose last state [n] and window [n, HISTORY] alone are kept."""
        to = indices.ssm_destinations[:, 0]
        self.ssm[to[to >= 0]] = states[to >= 0]
        self.conv[to[to >= 0], :HISTORY] = windows[to >= 0]

    def copy(self, copies):
        """Copy states; the rows are independent, so all sources are read before anything is written."""
        drafts = self.conv.shape[1]
        ssm = copies.ssm_sources >= 0
        self.ssm[copies.destinations[ssm]] = self.ssm[copies.ssm_sources[ssm]]
        windows = self.conv[copies.conv_sources].copy()
        for bias in np.unique(copies.conv_offsets):
            rows = (copies.conv_offsets == bias) & (copies.conv_sources >= 0)
            self.conv[copies.destinations[rows], : drafts - bias] = windows[rows, bias:]
