"""Ways of serving the same texts: whole and in parts, alone and together, computed and cached."""

from collections.abc import Callable, Sequence

from ..config import InferenceConfig
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.request import RequestStep
from ..inference.contexts.step_inputs import StepInputs
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..request import SamplingParams
from .step_memory import larger_shape
from .watched_model import Rule, WatchedModel


class Server:
    """Engines whose requests generate the rest of their texts, whatever the model answers."""

    def __init__(self, watched: WatchedModel, texts: list[list[int]], num_drafts: int) -> None:
        self.texts, self.num_drafts = texts, num_drafts
        self.block = (len(texts[0]) - 4) // 4
        self._watched = watched
        self._text_of: dict[int, list[int]] = {}
        self._turn = 0
        self.engine: DynamicInferenceEngine

    def begin(self, max_tokens: int, max_requests: int = 1, drafts: int = 0, **settings: object) -> None:
        """A new engine, with a prefix cache unless `settings` say otherwise."""
        longest = len(self.texts[0]) + 1
        sizes: dict[str, object] = {
            "block_size_tokens": self.block,
            "max_requests": max_requests,
            "max_tokens": max(max_tokens, max_requests),
            "max_sequence_length": longest,
            "num_kv_blocks": (3 + max_requests) * -(-longest // min(self.block, 8)),
            "num_mamba_slots": 24,
            "num_speculative_tokens": drafts,
        }
        config = InferenceConfig(**(sizes | settings))  # type: ignore[arg-type]
        self.engine = DynamicInferenceEngine(self._watched, config, drafter=self if drafts else None)
        self.engine.context.observe(self)

    def pad(self) -> None:
        """Pad all steps from now on."""
        context, begin_step = self.engine.context, self.engine.context.begin_step
        context.begin_step = lambda steps, padding=None, sampled_tokens=None: begin_step(  # type: ignore[method-assign]
            steps, larger_shape, sampled_tokens
        )

    def step_begun(self, steps: Sequence[RequestStep], inputs: StepInputs) -> None:
        self._watched.texts = [self._text_of[step.request.request_id] for step in steps]

    def step_ended(self, steps: Sequence[RequestStep]) -> None: ...

    def add(
        self, text: list[int], prompt: int, stop: int = 0, salt: str | None = None, scores: bool = False,
        plan: CheckpointPlan | None = None,
    ) -> None:  # fmt: skip
        """Ask for text[prompt:stop] after text[:prompt]; `scores`: logits of all prompt tokens."""
        length = max(1, stop - prompt)
        params = SamplingParams(num_tokens_to_generate=length, skip_prompt_log_probs=not scores)
        number = self.engine.add_request(text[:prompt], params, cache_salt=salt, checkpoint_plan=plan)
        self._text_of[number] = text

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """What the text says, or other tokens, and any number of them, by turns."""
        known, length = list(tokens), len(tokens)
        text = next(text for text in self._text_of.values() if text[:length] == known)
        follows = text[length : length + max_drafts]
        self._turn += 1
        wrong = (self._turn % 4 - 1) % 4  # the place of a draft that is wrong: 0 to 3
        if self._turn % 4 == 3 or wrong >= len(follows):
            return follows[: 1 + self._turn % 3]
        follows[wrong] = next(token for token in text if token != follows[wrong])
        return follows


def _cuts(server: Server) -> None:
    """Prompts whole, of other lengths, and cut on the chunk grid and elsewhere."""
    (x, y, z), block = server.texts, server.block
    every = CheckpointPlan.every_block(block)
    server.begin(4 * block)
    for number, (text, length) in enumerate(((x, 4 * block), (y, 2 * block + 3), (z, 2 * block + 3))):
        server.add(text, length, salt=f"{number}", scores=True, plan=every)
        server.finish()
    for length in (1, 2, block, 2 * block + 1):
        server.add(x, length, salt=f"{length} tokens", plan=every)
        server.finish()
    for text, length, budget in ((x, 6, 1), (y, 9, 2), (x, 3 * block + 2, max(2, block // 3))):
        server.begin(budget, enable_prefix_caching=False, num_mamba_slots=None)
        server.add(text, length, scores=True)
        server.finish()
    server.begin(block)
    server.add(x, 4 * block, plan=every)
    server.finish()


def _decodes(server: Server) -> None:
    """The rest of the text token by token, from prompts of different lengths."""
    block = server.block
    server.begin(4 * block)
    spans = [(1, min(2 * block + 4, 48)), (block - 2, block + 5), (4 * block - 4, 4 * block)]
    for number, (prompt, stop) in enumerate(spans):
        server.add(server.texts[0], prompt, stop, salt=str(number))
        server.finish()


def _together(server: Server, padded: bool = False) -> None:
    """Requests of different lengths at once: decodes with prefills."""
    (x, y, z), block = server.texts, server.block
    server.begin(8 * block, max_requests=5)
    if padded:
        server.pad()
    server.add(x, block + 3, block + 9, salt="a")
    server.add(y, 1, 8, salt="b")
    server.add(z, block, block + 3, salt="c", scores=True)
    for _ in range(2):
        server.engine.step()
    server.add(y, 2 * block + 1, salt="d")
    server.add(x, 2, 6, salt="e", scores=True)
    server.engine.step()
    server.add(z, block - 1, block + 2, salt="f")
    server.finish()


def _cached(server: Server) -> None:
    """A prompt, then repeats, extensions and forks of it, which resume from cached states."""
    (x, y, z), block = server.texts, server.block
    server.begin(4 * block + 2, max_requests=2)
    fork, late_fork = (x[: block + 1] + other[: block + 4] for other in (y, z))
    asked = [(x, 2 * block + 3, 2 * block + 5), (fork, 2 * block, 0), (x, 2 * block + 3, 2 * block + 5)]
    asked += [(x, 2 * block, 2 * block + 2), (x, 3 * block - 2, 3 * block + 3), (x, 4 * block, 4 * block + 2)]
    for text, prompt, stop in (*asked, (late_fork, 2 * block, 0)):
        server.add(text, prompt, stop)
        server.finish()
    server.add(x, 2 * block + 4, 2 * block + 6)
    server.add(late_fork, 2 * block + 2)
    server.finish()


def _drafts(server: Server) -> None:
    """Decode rows of several tokens, whose drafts are right, wrong, or too few."""
    (x, y, z), block = server.texts, server.block
    server.begin(4 * block, max_requests=3, drafts=server.num_drafts)
    server.add(x, block - 3, block + 12, salt="a")
    server.add(y, 2, 12, salt="b")
    for _ in range(3):
        server.engine.step()
    server.add(z, block + 1, block + 4, salt="c")
    server.finish()


WAYS: dict[Rule, Callable[[Server], None]] = {
    Rule.CUTS_DIFFER: _cuts,
    Rule.DECODE_DIFFERS: _decodes,
    Rule.BATCH_DIFFERS: _together,
    Rule.CACHE_DIFFERS: _cached,
    Rule.DRAFTS_DIFFER: _drafts,
    Rule.PADDING_DIFFERS: lambda server: _together(server, padded=True),
}
