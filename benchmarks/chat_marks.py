"""How many prompt tokens of a chat resume after what clients do, with marks of the template and without?

Each history is a few requests to an engine with the real maps of prefixes, blocks and states. Its model
gives the answers of a script. A token is a byte or a special token of the template. The figures are those of
the last request:
  prompt    its tokens
  ideal     tokens that it shares with an earlier request or its answer, rounded down to a block
  marks     tokens that it resumed with `encode_chat_marked` and `CheckpointPlan(marks=...)`
  none      tokens that it resumed with the default plan
  states    states that all requests of the history stored, with marks and without
Templates are those of `chat_templates.py`, and with --templates every *.jinja file of a folder. A history
that a template refuses, or for which it has no tools or thinking, is left out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mambaslots as ms
import torch
from crowd.chat_histories import History, Request, histories
from crowd.chat_templates import TEMPLATES, special_tokens
from crowd.engines import stub_spec
from mambaslots.text import ByteTokenizer, ChatTemplate, TextCodec
from mambaslots.text.codec import MarkedPrompt
from support.command_line import add_count, make_parser
from torch import Tensor


class ScriptedModel:
    """Answers as `script` says: `script[p + 1]` follows position p. Serves one request at a time.

    It also drafts what it is going to say, which saves steps and changes neither tokens nor cached states.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.script: Sequence[int] = ()

    def state_spec(self) -> ms.HybridStateSpec:
        return stub_spec(self._vocab_size)

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        return self.script[len(tokens) : len(tokens) + max_drafts]

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        logits = torch.zeros(len(inputs.logit_tokens), self._vocab_size)
        for row, position in enumerate(inputs.positions[inputs.logit_tokens].tolist()):
            logits[row, self.script[min(position + 1, len(self.script) - 1)]] = 1
        return logits


@dataclass(frozen=True)
class Row:
    """One history under one template; the fields are the columns."""

    template: str
    history: str
    prompt: int
    ideal: int
    marks: int
    none: int
    states_with_marks: int
    states_without: int


def make_codec(template: str) -> TextCodec:
    tokenizer = ByteTokenizer(special_tokens(template))
    return TextCodec(tokenizer, ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}))


def answer_tokens(codec: TextCodec, request: Request) -> list[int]:
    """What the model says: what the template writes behind the prompt, with the thinking that it drops."""
    assert codec.chat_template is not None
    template, thinking = codec.chat_template, request.answer.get("reasoning_content", "")
    before = template.render(request.messages, **request.variables)
    try:
        after = template.render([*request.messages, request.answer], False, **request.variables)
    except ValueError:
        after = ""
    if after.startswith(before) and thinking in after:
        return codec.encode(after[len(before) :])
    begin = "" if before.rstrip().endswith("<think>") else "<think>"
    thought = f"{begin}\n{thinking}\n</think>\n\n" if thinking else ""
    return codec.encode(thought + (request.answer["content"] or json.dumps(request.answer["tool_calls"])))


def encoded(codec: TextCodec, history: History) -> list[tuple[MarkedPrompt, list[int]]] | None:
    """Prompts and answers; None where the template refuses one of them."""
    try:
        prompts = [codec.encode_chat_marked(each.messages, **each.variables) for each in history.requests]
    except ValueError:
        return None
    return [
        (prompt, answer_tokens(codec, request))
        for prompt, request in zip(prompts, history.requests, strict=True)
    ]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def ideal(served: list[tuple[MarkedPrompt, list[int]]], block: int) -> int:
    """Tokens that the last request can resume at best. A block is known once its last token was computed."""
    tokens = served[-1][0].tokens
    before = [[*prompt.tokens, *answer[:-1]] for prompt, answer in served[:-1]]
    longest = min(max(shared(tokens, each) for each in before), len(tokens) - 1)
    return longest - longest % block


def resumed(served: list[tuple[MarkedPrompt, list[int]]], block: int, with_marks: bool) -> tuple[int, int]:
    """Tokens that the last request resumed, and the states that were stored."""
    vocab_size = 1 + max(max(*prompt.tokens, *answer, 255) for prompt, answer in served)
    model = ScriptedModel(vocab_size)
    config = ms.InferenceConfig(
        block_size_tokens=block, max_requests=1, max_tokens_per_step=4096, max_sequence_length=2**16,
        num_kv_blocks=2**14, num_mamba_slots=256, num_speculative_tokens=31,
    )  # fmt: skip
    engine, plan = ms.DynamicInferenceEngine(model, config, drafter=model), ms.CheckpointPlan()
    num_resumed = 0
    for prompt, answer in served:
        model.script = [*prompt.tokens, *answer]
        taken = replace(plan, marks=prompt.marks) if with_marks else plan
        params = ms.SamplingParams(max_tokens=len(answer))
        (result,) = engine.generate([prompt.tokens], params, checkpoint_plan=taken)
        num_resumed = result.num_resumed_tokens
    return num_resumed, engine.stats().cache.num_states_committed


def measure(name: str, template: str, block: int) -> Iterator[Row]:
    """The histories that the template renders: with a system prompt, or where it refuses that, without."""
    codec = make_codec(template)
    knows = {"": True, "tools": "tools" in template, "thinking": "think>" in template}
    for with_system in (True, False):
        rendered = {
            history.name: served
            for history in histories(with_system, knows["tools"])
            if knows[history.needs] and (served := encoded(codec, history))
        }
        for history, served in rendered.items():
            (marks, states), (none, without) = (resumed(served, block, marked) for marked in (True, False))
            num_tokens, best = len(served[-1][0].tokens), ideal(served, block)
            yield Row(name, history, num_tokens, best, marks, none, states, without)
        if rendered:
            return


def table(rows: Sequence[Row], column: str) -> None:
    """Sums of the rows that agree in `column`, and of all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(getattr(row, column), []).append(row)
    width = max(map(len, [*groups, column]))
    heads = "cases   prompt    ideal    marks     none  marks/ideal  none/ideal  states   none"
    print(f"\n{column:{width}}  {heads}")
    for name, group in [*groups.items(), ("all", list(rows))]:
        prompt, best, marks, none, states, without = (
            sum(getattr(row, field) for row in group)
            for field in ("prompt", "ideal", "marks", "none", "states_with_marks", "states_without")
        )
        shares = [f"{part / best:.3f}" if best else "-" for part in (marks, none)]
        print(
            f"{name:{width}} {len(group):6,} {prompt:8,} {best:8,} {marks:8,} {none:8,} "
            f"{shares[0]:>12} {shares[1]:>11} {states:7,} {without:6,}"
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--templates", type=Path, metavar="FOLDER", help="*.jinja files, beside our own templates"
    )
    add_count(parser, "--block", 32, "tokens of a block; a multiple of 4", at_least=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(arguments.templates.glob("*.jinja")) if arguments.templates else []
    templates = TEMPLATES | {path.stem: path.read_text("utf-8") for path in files}
    rows = []
    for name, template in templates.items():
        found = list(measure(name, template, arguments.block))
        print(f"{name}: {len(found)} histories", "" if found else "(the template refuses all)", flush=True)
        rows += found
    table(rows, "template")
    table(rows, "history")
    exact = sum(row.marks == row.ideal for row in rows)
    print(f"\nas deep as possible with marks: {exact} of {len(rows)};", end=" ")
    print(f"without: {sum(row.none == row.ideal for row in rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
