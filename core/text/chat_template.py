"""A chat as the text that a model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A Jinja template, as a checkpoint's `chat_template.jinja` holds it.

    The template runs in a sandbox: it sees `messages`, `add_generation_prompt` and the given variables only.
    How long it runs and how much it writes is its own: a checkpoint is trusted with that.

    Args:
        source: the template.
        variables: more names for the template, for example {"bos_token": "<s>"}.

    Raises:
        ValueError: `source` is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            optimized=False,
            finalize=_as_it_is,
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ValueError(f"the chat template is no Jinja template: {error}") from error
        self._variables = dict(variables or {})

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat.

        Args:
            messages: mappings with at least "role" and "content", oldest first; plain JSON values.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: more names for this text, for example `enable_thinking`.

        Raises:
            ValueError: the template refuses the messages, or they hold something else than JSON.
        """
        try:
            plain = json.loads(json.dumps({"messages": messages} | self._variables | variables))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the messages cannot be given to a template: {error}") from error
        try:
            return self._template.render(plain, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is code
            raise ValueError(f"the chat template refuses the messages: {error}") from error


@pass_context
def _as_it_is(context: Context, value: Any) -> Any:
    """`value`. Because this asks for the context, Jinja computes no constant when a template is only read."""
    return value


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
