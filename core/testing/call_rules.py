"""What one call of a model must return, and what it must not write."""

import traceback
from pathlib import Path

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..state_spec import HybridStateSpec
from .memory_stage import Outcome
from .report import Findings
from .rules import Rule


def judge_strays(findings: Findings, outcome: Outcome, inputs: StepInputs, where: str) -> None:
    """Whether the call wrote what is not its to write, misplaced KV apart."""
    if outcome.changed_inputs:
        names = ", ".join(f"inputs.{name}" for name in outcome.changed_inputs)
        findings.add(Rule.INPUTS_CHANGED, f"the model writes to {names}", where)
    destinations = inputs.state_destinations, inputs.chunks.destinations, inputs.checkpoints.destinations
    some_none = any(bool((indices < 0).any()) for indices in destinations)
    strays = outcome.touched_slots + (0 if some_none else outcome.touched_guards)
    if strays:
        message = f"the model writes to {strays} slots of the state pool that are no destinations of the step"
        findings.add(Rule.FOREIGN_SLOT_WRITTEN, message, where)
    if outcome.touched_sources:
        message = f"the model writes to {outcome.touched_sources} source slots that are no destinations"
        findings.add(Rule.SOURCE_WRITTEN, message, where)
    if some_none and outcome.touched_guards:
        message = "a destination is -1, and the model writes to the first or the last slot of the pool"
        findings.add(Rule.PADDING_SLOT_WRITTEN, message, where)
    if outcome.touched_guard_kv and bool((inputs.kv_write_positions < 0).any()):
        message = "a position is -1, and the model writes to the first or the last KV block"
        findings.add(Rule.PADDING_KV_WRITTEN, message, where)


def judge_kv(findings: Findings, outcome: Outcome, inputs: StepInputs, where: str) -> None:
    """Whether the call wrote the KV of its new tokens, and no other."""
    padding = bool((inputs.kv_write_positions < 0).any())
    strays = outcome.touched_kv + (0 if padding else outcome.touched_guard_kv)
    missing = ~outcome.kv_written
    if not missing.any():
        if strays:
            message = f"the model writes to {strays} KV positions that are not among kv_write_positions"
            findings.add(Rule.FOREIGN_KV_WRITTEN, message, where)
        return
    parts = sorted({f"{'KV'[part]} of layer {layer}" for layer, part, _ in missing.nonzero().tolist()})
    tokens = int(missing.flatten(0, 1).any(0).sum())
    message = f"{tokens} of {missing.shape[2]} new tokens get no {', '.join(parts)} at their positions"
    if strays:
        findings.add(Rule.KV_MISPLACED, f"{message}, and {strays} other positions are written", where)
    else:
        findings.add(Rule.KV_NOT_WRITTEN, message, where)


def wrong_logits(logits: object, inputs: StepInputs, spec: HybridStateSpec) -> str:
    """What is wrong with the type, shape, dtype or device of logits; empty where nothing is."""
    accepted = len(inputs.logit_tokens), spec.vocab_size
    if not isinstance(logits, Tensor):
        return f"the model returns a {type(logits).__name__}; accepted: a tensor of shape {accepted}"
    if logits.shape != accepted:
        tokens = inputs.shape.tokens
        every = tokens != accepted[0] and logits.shape[:1] == (tokens,)
        hint = f", of all {tokens} tokens" if every else ""
        return (
            f"the logits have shape {tuple(logits.shape)}{hint}; accepted: {accepted}, one row for each of "
            f"inputs.logit_tokens and one column for each of vocab_size"
        )
    if not logits.is_floating_point() or logits.device != inputs.token_ids.device:
        return (
            f"the logits are {logits.dtype} on {logits.device}; accepted: floating point on "
            f"{inputs.token_ids.device}"
        )
    return ""


def describe_error(error: Exception) -> str:
    """An error in one sentence: its type, its first line, and the last line outside of torch on its way."""
    message = (str(error).strip().splitlines() or ["no message"])[0]
    library = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((library, "<"))]
    frame = (own or list(frames))[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}, `{frame.line}`"
    return f"{type(error).__name__}: {message}, raised at {place}"
