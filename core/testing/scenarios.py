"""Ways of serving the same texts: whole and in parts, alone and together, computed and cached."""

from collections.abc import Callable
from dataclasses import dataclass

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from .model_audit import ModelAudit
from .rules import Rule
from .scripted_engine import Script, ScriptedEngine


@dataclass(frozen=True)
class Texts:
    """What is served.

    Attributes:
        scripts: three texts that differ from their first token on where the vocabulary allows.
        num_tokens: tokens of the longest prompt.
        block: tokens of a KV block.
        chunk: tokens of a chunk.
        num_speculative_tokens: most drafts a request and step.
    """

    scripts: tuple[Script, Script, Script]
    num_tokens: int
    block: int
    chunk: int
    num_speculative_tokens: int

    def engine(
        self,
        audit: ModelAudit,
        max_tokens: int,
        max_requests: int = 1,
        caching: bool = True,
        block: int = 0,
        drafts: int = 0,
    ) -> ScriptedEngine:
        block = block or self.block
        longest = len(self.scripts[0]) + 1
        return ScriptedEngine(
            audit,
            drafts,
            block_size_tokens=block,
            max_requests=max_requests,
            max_tokens=max(max_tokens, max_requests),
            max_sequence_length=longest,
            num_kv_blocks=(3 + max_requests) * -(-longest // block),
            num_mamba_slots=24 if caching else None,
            enable_prefix_caching=caching,
        )


def serve_whole(texts: Texts, audit: ModelAudit) -> None:
    """Each prompt in one step."""
    x, y, z = texts.scripts
    engine, block = texts.engine(audit, texts.num_tokens), texts.block
    plan = CheckpointPlan.every_block(block)
    prompts = [(x, texts.num_tokens, True), (y, 2 * block + 3, True), (z, 2 * block + 3, True)]
    prompts += [(x, length, False) for length in (1, 2, block, 2 * block, 2 * block + 1)]
    for number, (script, length, all_logits) in enumerate(prompts):
        engine.add(script, length, all_logits=all_logits, salt=str(number), plan=plan)
        engine.finish()


def serve_token_by_token(texts: Texts, audit: ModelAudit) -> None:
    """Prompts of different lengths, and the rest of the text decoded."""
    x, _, _ = texts.scripts
    engine, block, end = texts.engine(audit, texts.num_tokens), texts.block, texts.num_tokens
    spans = [(1, min(2 * block + 4, 48)), (block - 2, block + 5), (end - 4, end)]
    for number, (prompt, stop) in enumerate(spans):
        engine.add(x, prompt, stop, salt=str(number))
        engine.finish()


def serve_in_cuts(texts: Texts, audit: ModelAudit) -> None:
    """Prompts computed in several steps, cut on the grid of chunks and beside it."""
    x, y, _ = texts.scripts
    chunk, end = texts.chunk, texts.num_tokens
    beside = max(2, chunk // 3)
    long = min(end, 3 * chunk + 2)
    for script, length, budget, all_logits in (
        (x, 6, 1, True),
        (y, 9, 2, False),
        (x, long, beside, True),
        (y, long, beside, False),
    ):
        engine = texts.engine(audit, budget, caching=False, block=max(2, budget))
        engine.add(script, length, all_logits=all_logits)
        engine.finish()
    engine = texts.engine(audit, texts.block)
    engine.add(x, end, plan=CheckpointPlan.every_block(texts.block))
    engine.finish()


def serve_together(texts: Texts, audit: ModelAudit) -> None:
    """Requests of different lengths at once: decodes beside prefills, some of whose logits are all wanted."""
    x, y, z = texts.scripts
    block = texts.block
    engine = texts.engine(audit, 8 * block, max_requests=5)
    engine.add(x, block + 3, block + 9, salt="a")
    engine.add(y, 1, 8, salt="b")
    engine.add(z, block, block + 3, all_logits=True, salt="c")
    engine.advance(2)
    engine.add(y, 2 * block + 1, salt="d")
    engine.add(x, 2, 6, all_logits=True, salt="e")
    engine.advance(1)
    engine.add(z, block - 1, block + 2, salt="f")
    engine.finish()


def serve_from_cache(texts: Texts, audit: ModelAudit) -> None:
    """A prompt, then repeats, extensions and forks of it, which resume from cached states."""
    x, y, z = texts.scripts
    block, end = texts.block, texts.num_tokens
    engine = texts.engine(audit, texts.num_tokens + 2, max_requests=2)
    fork = (*x[: block + 1], *y[: block + 4])
    late_fork = (*x[: block + 1], *z[: block + 1])
    requests = [
        (x, 2 * block + 3, 2 * block + 5),
        (fork, len(fork) - 1, None),  # KV is known for one block, and no state there
        (x, 2 * block + 3, 2 * block + 5),  # the first again
        (x, 2 * block, 2 * block + 2),  # ends where a state is: resumes before it, or computes all
        (x, 3 * block - 2, 3 * block + 3),  # extends it, and crosses a boundary while decoding
        (x, end, end + 2),  # resumes from the state that was taken while decoding
        (late_fork, len(late_fork) - 1, None),
    ]
    for script, prompt, stop in requests:
        engine.add(script, prompt, stop)
        audit.reached["resumed tokens"] += sum(result.num_resumed_tokens for result in engine.finish())
    engine.add(x, 2 * block + 4, 2 * block + 6)
    engine.add(late_fork, len(late_fork) - 1)
    audit.reached["resumed tokens"] += sum(result.num_resumed_tokens for result in engine.finish())


def serve_with_drafts(texts: Texts, audit: ModelAudit) -> None:
    """Decode rows of several tokens, whose drafts are right, wrong, or too few."""
    x, y, z = texts.scripts
    block, drafts = texts.block, texts.num_speculative_tokens
    engine = texts.engine(audit, 4 * block, max_requests=3, drafts=drafts)
    engine.add(x, block - 3, block + 12, salt="a")
    engine.add(y, 2, 12, salt="b")
    engine.advance(3)
    engine.add(z, block + 1, block + 4, salt="c")
    engine.finish()


@dataclass(frozen=True)
class Scenario:
    """One way of serving the texts.

    Attributes:
        name: what the way is held against the others for.
        rule: the rule that is broken where logits differ.
        serve: serves it.
        needs: rules; where one of them is broken, nothing is to be learned from this scenario.
    """

    name: str
    rule: Rule
    serve: Callable[[Texts, ModelAudit], None]
    needs: tuple[Rule, ...] = ()


_STATES = (Rule.DECODE_STATE_WRONG, Rule.PREFILL_STATE_WRONG, Rule.CHUNK_STATE_WRONG, Rule.WINDOW_WRONG)
_ALWAYS = (Rule.NOT_CAUSAL, Rule.LOGITS_OF_OTHER_TOKENS, Rule.KV_WRONG)
_ROWS = (*_ALWAYS, Rule.DECODE_DIFFERS, Rule.PREFILL_STATE_WRONG)
SCENARIOS = (
    Scenario("whole prompts", Rule.NOT_CAUSAL, serve_whole),
    Scenario("prefill against decode", Rule.DECODE_DIFFERS, serve_token_by_token, _ALWAYS),
    Scenario(
        "prompts cut into steps", Rule.CUTS_DIFFER, serve_in_cuts, (*_ALWAYS, Rule.PREFILL_STATE_WRONG)
    ),
    Scenario("batches", Rule.BATCH_DIFFERS, serve_together, _ROWS),
    Scenario(
        "prefix cache", Rule.CACHE_DIFFERS, serve_from_cache,
        (*_ROWS, *_STATES, Rule.CUTS_DIFFER, Rule.BATCH_DIFFERS),
    ),
    Scenario("drafts", Rule.DRAFTS_DIFFER, serve_with_drafts, (*_ROWS, Rule.BATCH_DIFFERS)),
)  # fmt: skip
