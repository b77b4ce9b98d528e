"""An engine that serves given texts, whatever its model answers."""

from collections.abc import Sequence

from ..config import InferenceConfig
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.step_inputs import StepInputs
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..request import RequestResult, SamplingParams
from .model_audit import ModelAudit

Script = Sequence[int]


class ScriptedEngine:
    """A `DynamicInferenceEngine` whose requests generate the rest of their scripts."""

    def __init__(self, audit: ModelAudit, num_speculative_tokens: int = 0, **settings: object) -> None:
        """`settings`: of `InferenceConfig`; pools are made large enough for a few scripts."""
        drafts = num_speculative_tokens
        config = InferenceConfig(num_speculative_tokens=drafts, **settings)  # type: ignore[arg-type]
        self._audit = audit
        self._scripts: dict[int, Script] = {}
        drafter = _ScriptDrafter(self._scripts) if drafts else None
        self._engine = DynamicInferenceEngine(audit, config, drafter=drafter)
        self._engine.context.observe(self)

    def step_begun(self, steps: Sequence[object], inputs: StepInputs) -> None:
        """Name the rows of the step, and their live slots, to the audit."""
        self._audit.scripts = [self._scripts[_request_id(step)] for step in steps]
        self._audit.live = {slot for step in steps for slot in _live_slots(step)}

    def step_ended(self, steps: Sequence[object]) -> None:
        """Nothing is to be done."""

    def add(
        self,
        script: Script,
        prompt: int,
        stop: int | None = None,
        *,
        all_logits: bool = False,
        salt: str | None = None,
        plan: CheckpointPlan | None = None,
    ) -> None:
        """Queue a request.

        Args:
            prompt: how many tokens of the script it begins with.
            stop: up to where of the script it generates; one token by default.
            all_logits: whether the logits of all prompt tokens are wanted; the request resumes from no state.
            salt: requests of different salts share no cached state.
        """
        length = 1 if stop is None else stop - prompt
        params = SamplingParams(num_tokens_to_generate=length, skip_prompt_log_probs=not all_logits)
        request = self._engine.add_request(
            list(script[:prompt]), params, cache_salt=salt, checkpoint_plan=plan
        )
        self._scripts[request] = script

    def advance(self, steps: int) -> None:
        """Make some steps."""
        for _ in range(steps):
            self._engine.step()

    def finish(self) -> list[RequestResult]:
        """Step until all requests have ended; the results of those that end here."""
        results: list[RequestResult] = []
        while self._engine.has_unfinished_requests():
            results += self._engine.step().finished
        return results


class _ScriptDrafter:
    """Drafts what the script says, or other tokens, and any number of them, by turns."""

    def __init__(self, scripts: dict[int, Script]) -> None:
        self._scripts = scripts
        self._turn = 0

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        follows = next(
            list(script[len(tokens) : len(tokens) + max_drafts])
            for script in self._scripts.values()
            if list(script[: len(tokens)]) == list(tokens)
        )
        self._turn += 1
        kind = self._turn % 4
        if kind == 1 or len(follows) < 2:
            return follows
        if kind == 2:  # the first draft stands, the second does not
            return [follows[0], self._other(follows[1]), *follows[2:]]
        return follows[:1] if kind == 3 else [self._other(follows[0]), *follows[1:]]

    def _other(self, token: int) -> int:
        """Some other token of the scripts."""
        return next((other for script in self._scripts.values() for other in script if other != token), token)


def _request_id(step: object) -> int:
    """With `_live_slots` the only access to what an engine calls one request's part of a step."""
    request_id: int = step.request.request_id  # type: ignore[attr-defined]
    return request_id


def _live_slots(step: object) -> tuple[int, ...]:
    slots: tuple[int, ...] = step.holding.live_slots  # type: ignore[attr-defined]
    return slots
