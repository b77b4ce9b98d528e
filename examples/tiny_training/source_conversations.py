"""Source files as conversations: a user asks for parts of a file, and the answers are those parts.

Everything is drawn with `random.Random`, so that a seed gives the same conversations everywhere.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from textwrap import dedent

from .special_tokens import conversation_tokens

SYSTEM_PROMPTS = (
    "You write Python.",
    "You write Python. Answer with code only.",
    "You are a careful Python programmer.",
    "You help to write the module {module}.",
    "You continue the module {module}. Answer with code only.",
)
MODULE_BEGINS = "{prompt} The module begins like this:\n\n{head}"
WRITE = (
    "Write the function `{signature}`.",
    "Please write `{signature}`.",
    "Now write `{signature}`.",
    "I need a function `{signature}`.",
    "How would you write `{signature}`?",
    "Next is `{signature}`.",
)
WRITE_BY_NAME = ("Write a function {name}.", "Now {name}, please.", "Write {name}.", "And {name}?")
CONTINUE = (
    "Continue this function:\n\n{start}",
    "Complete this code:\n\n{start}",
    "How does this go on?\n\n{start}",
    "Please finish this:\n\n{start}",
)
NEXT = ("And the next function?", "Go on with the next one.", "What comes after it?", "Next, please.")
HEAD = ("How does the module {module} begin?", "Write the beginning of {module}.")
EXPLAIN = ("What does `{signature}` do?", "Write the docstring of `{signature}`.")
MAX_ANSWER = 1200
MAX_CONVERSATION = 6000


@dataclass(frozen=True)
class _Function:
    signature: str  # without "def" and the colon
    name: str
    source: bytes  # dedented
    docstring: str


def conversations(texts: dict[str, bytes], seed: int) -> Iterator[list[int]]:
    """The tokens of some conversations over each file; files that Python cannot parse give none."""
    rng = Random(seed)
    for path, text in texts.items():
        functions = _functions(text)
        if functions:
            for _ in range(1 + len(functions) // 12):
                yield _conversation(path, text, functions, rng)


def _conversation(path: str, text: bytes, functions: list[_Function], rng: Random) -> list[int]:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    messages: list[tuple[str, bytes]] = []
    if rng.random() < 0.7:
        prompt = rng.choice(SYSTEM_PROMPTS).format(module=module)
        if rng.random() < 0.6:
            head = _head(text, rng.randrange(200, 1000))
            prompt = MODULE_BEGINS.format(prompt=prompt, head=head.decode())
        messages.append(("system", prompt.encode()))
    place = rng.randrange(len(functions))
    size = 0
    while size < MAX_CONVERSATION:
        question, answer = _turn(module, text, functions, place, bool(size), rng)
        messages += [("user", question), ("assistant", answer)]
        size += len(question) + len(answer)
        place = place + 1 if rng.random() < 0.7 else rng.randrange(len(functions))
        if place >= len(functions):
            break
    return conversation_tokens(messages)


def _turn(
    module: str, text: bytes, functions: list[_Function], place: int, later: bool, rng: Random
) -> tuple[bytes, bytes]:
    """What the user asks about a function, and the answer."""
    function, kind = functions[place], rng.random()
    named = {"signature": function.signature, "name": function.name, "module": module}
    source = function.source
    if kind < 0.3:
        lines = source.splitlines(keepends=True)
        shown = rng.randrange(1, max(2, 2 * len(lines) // 3))
        start, rest = b"".join(lines[:shown]), b"".join(lines[shown:])
        if rest:
            return rng.choice(CONTINUE).format(start=start.decode()).encode(), rest[:MAX_ANSWER]
    if kind < 0.35 and function.docstring:
        return rng.choice(EXPLAIN).format(**named).encode(), function.docstring.encode()
    if kind < 0.4 and not later:
        return rng.choice(HEAD).format(**named).encode(), _head(text, 600)
    if kind < 0.5 and later and place:
        return rng.choice(NEXT).encode(), source
    ask = rng.choice(WRITE if kind < 0.85 else WRITE_BY_NAME)
    return ask.format(**named).encode(), source


def _head(text: bytes, size: int) -> bytes:
    """The first whole lines of a file, about `size` bytes."""
    end = text.find(b"\n", size)
    return text if end < 0 else text[: end + 1]


def _functions(text: bytes) -> list[_Function]:
    """Functions and methods of a file, in its order, that are neither trivial nor long."""
    try:
        with warnings.catch_warnings(action="ignore"):  # tests of the library hold doubtful literals
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.decode().split("\n")
    found = []
    for node in sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)),
        key=lambda node: node.lineno,
    ):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = dedent("\n".join(lines[first - 1 : node.end_lineno])) + "\n"
        if source.count("\n") >= 2 and len(source.encode()) <= MAX_ANSWER:
            arguments = ast.unparse(node.args)
            docstring = ast.get_docstring(node) or ""
            found.append(
                _Function(f"{node.name}({arguments})", node.name, source.encode(), docstring[:MAX_ANSWER])
            )
    return found
