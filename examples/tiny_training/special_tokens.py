"""The tokens behind the 256 bytes, the text of a conversation, and the files that hold both."""

import json
from collections.abc import Sequence
from pathlib import Path

from mambaslots.text import ByteTokenizer

DOCUMENT = 256  # begins each document
SYSTEM, USER, ASSISTANT, END_OF_TURN = 257, 258, 259, 260
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
SPECIAL_TOKENS = {
    "<|document|>": DOCUMENT,
    **{f"<|{role}|>": token for role, token in ROLES.items()},
    "<|end_of_turn|>": END_OF_TURN,
    **{f"<|reserved_{number}|>": 261 + number for number in range(3)},
}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = """\
{{- "<|document|>" -}}
{%- for message in messages -%}
  {%- if message["role"] not in ("system", "user", "assistant") -%}
    {{- raise_exception("the roles are system, user and assistant") -}}
  {%- endif -%}
  {{- "<|" + message["role"] + "|>" + message["content"] + "<|end_of_turn|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|assistant|>" -}}
{%- endif -%}
"""
GENERATION = {
    "bos_token_id": DOCUMENT,
    "eos_token_id": [END_OF_TURN, DOCUMENT],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "max_new_tokens": 400,
}
# For transformers, which reads the other files, too.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|document|>",
    "eos_token": "<|end_of_turn|>",
    "clean_up_tokenization_spaces": False,
}


def conversation_tokens(messages: Sequence[tuple[str, bytes]]) -> list[int]:
    """What the chat template writes for messages of (role, text)."""
    tokens = [DOCUMENT]
    for role, text in messages:
        tokens += [ROLES[role], *text, END_OF_TURN]
    return tokens


def write_text_files(folder: Path) -> None:
    """Write the tokenizer, the chat template and the defaults of answers into a model's folder."""
    ByteTokenizer(SPECIAL_TOKENS).save(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    for name, content in (("generation_config", GENERATION), ("tokenizer_config", TOKENIZER_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
