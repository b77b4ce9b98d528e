"""What the users of `serve_conversations.py` ask for, under which system prompts, and when.

Each user writes a Python module with the model's help. Everything is drawn with `random.Random` from the
texts below: a seed gives the same conversations everywhere.
"""

from dataclasses import dataclass
from random import Random

MODULES = {
    '''"""Queues of lines that outlive the process.

A queue is a file. Readers take lines from its beginning, writers add lines to its end. Every change is
written to disk before the call returns.
"""

import json
import os
import threading

__all__ = ["LineQueue", "Empty"]


class Empty(Exception):
    """Raised by LineQueue.get() if there is no line."""


class LineQueue:
    """A queue of lines in the file `path`, which is made if it does not exist."""

    def __init__(self, path, maxsize=0):
        self.path = path
        self.maxsize = maxsize
        self._lock = threading.Lock()
        self._lines = []
''': (
        "put(self, line)", "get(self, block=True, timeout=None)", "close(self)", "empty(self)",
        "qsize(self)", "__len__(self)", "__iter__(self)", "_load(self)", "_save(self, lines)",
        "join(self)", "clear(self)", "__enter__(self)", "__exit__(self, *args)", "put_nowait(self, line)",
    ),
    '''"""Read and write tables whose cells are separated by a character.

    for row in Table(file, sep=';'):
        print(row['name'])
"""

import io
import re
from collections import OrderedDict

_quoted = re.compile(r'"((?:[^"]|"")*)"')
_default_sep = ','


class Error(Exception):
    """A row has too many cells, or too few."""


class Table:
    def __init__(self, file, sep=_default_sep, header=True):
        self.file = file
        self.sep = sep
        self.names = None
        self.line_num = 0
        if header:
            self.names = self.read_row()
''': (
        "read_row(self)", "write_row(self, row)", "parse_line(line, sep)", "quote(text)",
        "unquote(text)", "__next__(self)", "__repr__(self)", "columns(self)", "sort(self, key=None)",
        "to_string(self)", "split_cells(line, sep)", "main()", "join(rows, sep=',')", "is_number(text)",
    ),
    '''import unittest
import tempfile
import os
from test import support

from intervals import Interval, IntervalSet, merge


class IntervalTestCase(unittest.TestCase):
    """Intervals have a start and an end; the end does not belong to them."""

    def setUp(self):
        self.empty = IntervalSet()
        self.one = IntervalSet([Interval(1, 4)])
        self.two = IntervalSet([Interval(1, 4), Interval(6, 9)])

    def test_len(self):
        self.assertEqual(len(self.empty), 0)
        self.assertEqual(len(self.one), 3)
        self.assertEqual(len(self.two), 6)
''': (
        "test_contains(self)", "test_merge(self)", "test_repr(self)", "test_add(self)",
        "test_equal(self)", "test_iter(self)", "test_hash(self)", "test_bad_arguments(self)",
        "test_pickle(self)", "test_copy(self)", "tearDown(self)", "test_remove(self)", "test_bool(self)",
        "check(self, start, end)",
    ),
    '''"""Find files that changed since the last run.

The names, sizes and times of all files below a folder are kept in a small database. A file whose size or time
differs is read, and its digest decides.
"""

import argparse
import hashlib
import os
import sys
import time

BLOCKSIZE = 65536
verbose = False


def digest(path):
    """Return the hex digest of the file."""
    h = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(BLOCKSIZE):
            h.update(block)
    return h.hexdigest()
''': (
        "walk(top, followlinks=False)", "load(path)", "save(path, entries)", "compare(old, new)",
        "main(argv=None)", "usage(code, msg='')", "report(changed, file=None)", "is_hidden(name)",
        "mtime(path)", "parse_args(args)", "remove(path)", "log(msg, *args)", "copy_file(src, dst)",
        "relative(path, start)",
    ),
}  # fmt: skip
SYSTEM_PROMPTS = tuple(f"You write Python. The module begins like this:\n\n{head}" for head in MODULES)

ASKS = (
    "Write the function `{signature}`.",
    "Please write `{signature}`.",
    "Now write `{signature}`.",
    "I need a function `{signature}`.",
    "How would you write `{signature}`?",
    "Next is `{signature}`.",
    "Continue this function:\n\ndef {signature}:\n",
    "Complete this code:\n\ndef {signature}:\n",
    'Please finish this:\n\ndef {signature}:\n    """',
)


@dataclass(frozen=True)
class Turn:
    """What a user says, and how the answer is sampled; `temperature` None is greedy.

    `think_steps`: engine steps between the answer before (or the start of the conversation) and this turn.
    """

    text: str
    answer_tokens: int
    temperature: float | None
    seed: int
    think_steps: int


@dataclass(frozen=True)
class Conversation:
    """A system prompt, the engine step at which the user arrives, and what the user will say."""

    system_prompt: str
    start_step: int
    turns: tuple[Turn, ...]


def conversations(count: int, turns: int, seed: int = 0, longest_answer: int = 140) -> list[Conversation]:
    """Users who arrive one after the other; the same arguments give the same conversations.

    Answers have at most three to seven sevenths of `longest_answer` tokens.
    """
    rng = Random(seed)
    users = []
    for index in range(count):
        prompt, signatures = rng.choice(list(zip(SYSTEM_PROMPTS, MODULES.values(), strict=True)))
        users.append(
            Conversation(
                system_prompt=prompt,
                start_step=30 * index + rng.randrange(15),
                turns=tuple(
                    _turn(number, rng.choice(signatures), longest_answer, rng) for number in range(turns)
                ),
            )
        )
    return users


def _turn(number: int, signature: str, longest_answer: int, rng: Random) -> Turn:
    return Turn(
        text=rng.choice(ASKS).format(signature=signature),
        answer_tokens=rng.randrange(max(1, 3 * longest_answer // 7), longest_answer + 1),
        temperature=rng.choice((None, 0.6, 0.8)),
        seed=rng.randrange(1 << 31),
        think_steps=0 if number == 0 else rng.randrange(5, 40),
    )


if __name__ == "__main__":
    print(__doc__)
