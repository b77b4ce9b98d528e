"""Any sequence of requests, steps and cancellations gives the recurrence's tokens and leaks nothing."""

from contextlib import ExitStack

import mambaslots as ms
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracle.budget import costly
from oracle.model_kinds import kind_of_model, kinds
from oracle.serving import TOLERANCE, assert_answers, random_tokens, small_engine
from oracle.workload import plans
from oracle.workload import prompt_log_probs as expected_log_probs

BLOCK = 8
ALPHABET = [random_tokens(60, seed) for seed in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Prompts are heads of a few texts, of earlier sequences, or forks of them; the pools are small."""

    @initialize(
        kind=kinds,
        slots=st.sampled_from([1, 2, 3, 40]),
        kv_blocks=st.sampled_from([13, 20, 100]),
        max_tokens_per_step=st.sampled_from([8, 13, 32]),
        policy=st.sampled_from(["value", "lru"]),
        plan=plans,
    )
    def start(
        self,
        kind: str,
        slots: int,
        kv_blocks: int,
        max_tokens_per_step: int,
        policy: str,
        plan: ms.CheckpointPlan,
    ) -> None:
        self.scope = ExitStack()
        self.scope.enter_context(kind_of_model(kind))
        self.engine = small_engine(
            num_mamba_slots=slots, num_kv_blocks=kv_blocks, max_tokens_per_step=max_tokens_per_step,
            max_requests=3,
            max_sequence_length=100, eviction_policy=policy, checkpoint_plan=plan,
        )  # fmt: skip
        self.prompts: dict[int, list[int]] = {}
        self.log_probs_starts: dict[int, int] = {}
        self.known = list(ALPHABET)
        self.prompt_tokens_of_finished = 0

    @rule(
        source=st.integers(0, 1000),
        head=st.integers(1, 60),
        tail=st.lists(st.integers(0, 255), max_size=5),
        answer=st.integers(1, 25),
        salt=st.sampled_from([None, None, b"tenant"]),
        prompt_log_probs=st.sampled_from([False, False, False, True]),
        plan=st.none() | plans,
        log_probs_start=st.integers(1, 30),
    )
    def add(
        self,
        source: int,
        head: int,
        tail: list[int],
        answer: int,
        salt: bytes | None,
        prompt_log_probs: bool,
        plan: ms.CheckpointPlan | None,
        log_probs_start: int,
    ) -> None:
        prompt = self.known[source % len(self.known)][:head] + tail
        params = ms.SamplingParams(
            max_tokens=answer,
            return_log_probs=True,
            skip_prompt_log_probs=not prompt_log_probs,
            prompt_log_probs_start=log_probs_start,
        )
        request_id = self.engine.add_request(prompt, params, cache_salt=salt, checkpoint_plan=plan)
        self.prompts[request_id] = prompt
        self.log_probs_starts[request_id] = log_probs_start

    @rule(
        sources=st.lists(st.integers(0, 1000), min_size=1, max_size=3),
        length=st.integers(2, 60),
        start=st.integers(1, 40),
        salt=st.sampled_from([None, None, b"tenant"]),
        plan=st.none() | plans,
    )
    def score(
        self,
        sources: list[int],
        length: int,
        start: int,
        salt: bytes | None,
        plan: ms.CheckpointPlan | None,
    ) -> None:
        """Heads of earlier sequences are scored, while what was added before advances."""
        known = [self.known[source % len(self.known)][:length] for source in sources]
        sequences = [tokens for tokens in known if len(tokens) > start]
        results = self.engine.score(sequences, start, cache_salt=salt, checkpoint_plan=plan)
        for tokens, result in zip(sequences, results, strict=True):
            expected = expected_log_probs(tuple(tokens))[start - 1 :]
            np.testing.assert_allclose(result.log_probs, expected, rtol=0, atol=TOLERANCE)
            computed = sum(result.computed_by_reason.values())
            assert result.num_resumed_tokens + computed == len(tokens) - 1
        for request_id in list(self.prompts):
            ended = self.engine.take_result(request_id)
            if ended is not None:
                self.check_result(ended)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for result in self.engine.step().finished:
                self.check_result(result)
            self.engine.context.check_integrity()

    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        if self.prompts:
            request_id = list(self.prompts)[which % len(self.prompts)]
            result = self.engine.cancel(request_id)
            self.check_tokens(self.prompts.pop(request_id), result)

    @rule(which=st.integers(0, 1000))
    def evict(self, which: int) -> None:
        running = self.engine.context.requests
        if running:
            self.engine.core.scheduler.preempt(running[which % len(running)])

    def check_result(self, result: ms.RequestResult) -> None:
        prompt = self.prompts.pop(result.request_id)
        self.check_tokens(prompt, result)
        self.known.append((prompt + result.tokens)[:60])
        computed = sum(result.computed_by_reason.values())
        assert result.num_prompt_tokens == len(prompt) == result.num_resumed_tokens + computed
        if result.prompt_log_probs is not None:
            start = self.log_probs_starts[result.request_id]
            assert result.num_resumed_tokens < start or start >= len(prompt)
            expected = expected_log_probs(tuple(prompt))[start - 1 :]
            np.testing.assert_allclose(result.prompt_log_probs, expected, rtol=0, atol=TOLERANCE)

    def check_tokens(self, prompt: list[int], result: ms.RequestResult) -> None:
        if result.tokens:
            assert_answers(prompt, result)

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.engine.context.check_integrity()
        stats = self.engine.context.cache_stats()
        assert stats.num_computed_tokens == sum(stats.computed_by_reason.values())
        assert stats.num_prompt_tokens == stats.num_resumed_tokens + stats.num_computed_tokens

    def teardown(self) -> None:
        with self.scope:
            while self.engine.has_unfinished_requests():
                self.step(1)
            assert self.engine.context.prefix_cache.kv_blocks.num_held == 0
            assert self.engine.context.requests == []


EngineMachine.TestCase.settings = costly()
TestEngineMachine = EngineMachine.TestCase
