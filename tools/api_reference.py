"""docs/api.md: the public names with their signatures and docstrings.

python tools/api_reference.py            (make docs: writes the page)
"""

import argparse
import enum
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"
MODULES = (
    "mambaslots",
    "mambaslots.net",
    "mambaslots.mcore",
    "mambaslots.serve",
    "mambaslots.replay",
    "mambaslots.vllm",
)
HEAD = """This page is generated from docstrings: `make docs`.

# API reference

The public names. [serving.md](serving.md), [cache.md](cache.md) and [distributed.md](distributed.md) show how
to use them.

"""


def public_names(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


def signature(found: Any) -> str:
    """Parameters without their types, which the docstrings and the code have."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown: list[str] = []
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and "*" not in shown
            and not any(p[:1] == "*" for p in shown)
        ):
            shown.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = ""
        if parameter.default is not parameter.empty:
            text = repr(parameter.default)
            default = "=..." if text.startswith("<") or len(text) > 30 else f"={text}"
        shown.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def docstring(found: Any) -> str:
    """Of the thing itself, not of what it inherits."""
    text = found.__doc__ if isinstance(found, property) else getattr(found, "__doc__", None)
    if not text or (inspect.isclass(found) and text.startswith(f"{found.__name__}(")):
        return ""
    return f"```text\n{inspect.cleandoc(text)}\n```\n"


def members(found: type) -> list[tuple[str, str, Any]]:
    """Name, call and object of public methods and properties with docstrings."""
    listed: list[tuple[str, str, Any]] = []
    for name, member in vars(found).items():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not getattr(inner, "__doc__", None):
            continue
        if isinstance(inner, property | cached_property):
            listed.append((name, "", inner))
        elif inspect.isfunction(inner):
            listed.append((name, f"`{name}{signature(inner)}`\n\n", inner))
    return listed


def described(name: str, found: Any) -> str:
    if inspect.ismodule(found):
        names = ", ".join(f"`{each}`" for each in public_names(found))
        return f"### {name}\n\nA module: {names}.\n\n"
    if inspect.isclass(found):
        call = (
            ""
            if issubclass(found, enum.Enum | BaseException) or inspect.isabstract(found)
            else signature(found)
        )
        text = f"### {name}\n\n" + (f"`{name}{call}`\n\n" if len(call) > 2 else "") + docstring(found) + "\n"
        for member_name, call, member in members(found):
            text += f"#### {name}.{member_name}\n\n{call}{docstring(member)}\n"
        return text
    if callable(found):
        return f"### {name}\n\n`{name}{signature(found)}`\n\n{docstring(found)}\n"
    return f"### {name}\n\n`{found!r}`\n\n"


def page() -> str:
    text = HEAD
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        text += f"## {module_name}\n\n"
        for name in public_names(module):
            text += described(name, getattr(module, name))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" at 0x[0-9a-f]+", "", text)).rstrip() + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
