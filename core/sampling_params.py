"""How the tokens of one request are chosen."""

from dataclasses import dataclass

from .validation import INT32_MAX, INT64_MAX, boolean, integer, integers, optional_integer, real, set_field


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. Without temperature, top_k and top_p decoding is greedy.

    Attributes:
        num_tokens_to_generate: maximum number of tokens to generate, >= 1.
        temperature: divides the logits; 0 or None is greedy (None with top_k or top_p means 1).
        top_k: keep the k most likely tokens; None or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; None keeps all. Of
            equally likely tokens, top_k and top_p keep those with the lowest ids.
        seed: seed of this request's random numbers. Token i depends on the seed, on i and on the distribution
            only; the batch, pauses and restarts change nothing. None makes a seed of `InferenceConfig.seed`
            and the request id, so requests without a seed differ from one another.
        termination_id: token that ends the answer, as its last token; None or -1 for no such token.
        stop_token_ids: more tokens that end the answer.
        return_log_probs: return one log-prob per generated token, under the model's own distribution (before
            temperature, top_k and top_p).
        num_top_log_probs: return so many of the most likely tokens at the position of each generated token,
            from 0 to 20, with their log-probs under the model's own distribution. Of equally likely tokens,
            those with the lowest ids come first.
        skip_prompt_log_probs: False also returns the log-probs of prompt tokens `prompt_log_probs_start` ..
            N-1. The tokens from `prompt_log_probs_start` - 1 on are then computed: the request resumes from
            no deeper state.
        prompt_log_probs_start: position of the first prompt token whose log-prob is returned, >= 1.
        num_generated: how many of the last tokens that are passed as the prompt belong to the answer, because
            another engine has generated them; fewer than `num_tokens_to_generate`. They count for that
            number and for the numbers of random numbers, so that the answer goes on as it would have gone on
            there. Results have the tokens behind them.
    """

    num_tokens_to_generate: int = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    termination_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    skip_prompt_log_probs: bool = True
    prompt_log_probs_start: int = 1
    num_generated: int = 0

    def __post_init__(self) -> None:
        length = integer("num_tokens_to_generate", self.num_tokens_to_generate, 1, INT32_MAX)
        set_field(self, "num_tokens_to_generate", length)
        if self.temperature is not None:
            set_field(self, "temperature", real("temperature", self.temperature, 0.0))
        set_field(self, "top_k", optional_integer("top_k", self.top_k, 0))
        if self.top_p is not None:
            set_field(self, "top_p", real("top_p", self.top_p, 0.0, 1.0))
            if self.top_p == 0.0:
                raise ValueError(f"top_p is {self.top_p!r}; accepted: greater than 0, at most 1")
        set_field(self, "seed", optional_integer("seed", self.seed, 0, INT64_MAX))
        set_field(self, "termination_id", optional_integer("termination_id", self.termination_id, -1))
        set_field(self, "stop_token_ids", tuple(integers("stop_token_ids", self.stop_token_ids, 0)))
        boolean("return_log_probs", self.return_log_probs)
        set_field(self, "num_top_log_probs", integer("num_top_log_probs", self.num_top_log_probs, 0, 20))
        boolean("skip_prompt_log_probs", self.skip_prompt_log_probs)
        first = integer("prompt_log_probs_start", self.prompt_log_probs_start, 1, INT32_MAX)
        set_field(self, "prompt_log_probs_start", first)
        given = integer("num_generated", self.num_generated, 0, length - 1)
        set_field(self, "num_generated", given)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        if self.temperature is None:
            return not self.top_k and self.top_p is None
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def stops(self) -> tuple[int | None, ...]:
        """The tokens that end the answer."""
        return self.termination_id, *self.stop_token_ids

    @property
    def returns_prompt_log_probs(self) -> bool:
        return not self.skip_prompt_log_probs
