"""Drafts: where they come from, which stand, what becomes of states and KV, and what they may cost others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import eq

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.engines import cuda_graphs
from mambaslots.inference.engines.cuda_graphs import GraphBuckets, GraphRunner
from mambaslots.inference.engines.drafter import accepted_tokens
from oracle.drafters import MixedDrafter, RightDrafter, WrongDrafter
from oracle.recorded_graphs import fix_addresses
from oracle.recurrent_lm import RecurrentLM
from oracle.sampled_rows import sampled, token_distribution
from oracle.serving import (
    TOLERANCE,
    expected_answer,
    random_tokens,
    resumable,
    run_checked,
    serve_checked,
    small_engine,
    small_model,
)  # fmt: skip

BLOCK = 8


def speculating(make_drafter=RightDrafter, most: int = 3, **settings: object) -> ms.DynamicInferenceEngine:
    return small_engine(num_speculative_tokens=most, make_drafter=make_drafter, **settings)


class TestNgramDrafter:
    @given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
    def test_it_finds_the_longest_suffix_at_its_last_occurrence(self, tokens, most, shortest, more):
        longest = shortest + more
        expected: list[int] = []
        for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
            found = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]]
            if found:
                text = list(tokens)
                for _ in range(most):
                    text.append(text[found[-1] + length + len(text) - len(tokens)])
                expected = text[len(tokens) :]
                break
        assert ms.NgramDrafter(longest, shortest).draft(tokens, most) == expected

    def test_large_ids_and_whole_periods(self):
        tokens = [2**31 - 1, 0, 256, 2**31 - 1, 0]
        assert ms.NgramDrafter().draft(tokens, 5) == [256, 2**31 - 1, 0, 256, 2**31 - 1]
        assert ms.NgramDrafter().draft([7] * 5, 3) == [7, 7, 7]
        assert ms.NgramDrafter().draft([0] * 5, 2) == [0, 0]
        assert ms.NgramDrafter().draft([1, 2, 3], 2) == []

    @pytest.mark.parametrize("sizes", [(0, 0), (2, 3), (4, 0), ("4", 2)])
    def test_sizes_are_checked(self, sizes):
        with pytest.raises(ValueError, match=r"(longest|shortest) is .*; accepted: "):
            ms.NgramDrafter(*sizes)


class TestAcceptance:
    @pytest.mark.parametrize(
        ("drafts", "drawn", "tokens", "accepted"),
        [
            ((), [5], [5], 0),
            ((1, 2, 3), [1, 2, 3, 4], [1, 2, 3, 4], 3),
            ((1, 2, 3), [1, 9, 3, 4], [1, 9], 1),
            ((1, 2, 3), [9, 2, 3, 4], [9], 0),
            ((1, 7, 3), [1, 7, 3, 4], [1, 7], 2),
            ((1, 2, 3), [1, 7, 3, 4], [1, 7], 1),
            ((1, 2), [1, 2, 7], [1, 2, 7], 2),
        ],
    )
    def test_of_what_was_drawn(self, drafts, drawn, tokens, accepted):
        assert accepted_tokens(drafts, drawn, (7, None)) == tokens
        assert sum(map(eq, drafts, tokens)) == accepted

    @pytest.mark.parametrize(
        "params",
        [
            ms.SamplingParams(temperature=1.0),
            ms.SamplingParams(temperature=0.7, top_k=5),
            ms.SamplingParams(temperature=1.6, top_p=0.8),
        ],
        ids=["temperature", "top_k", "top_p"],
    )
    @pytest.mark.parametrize("draft", ["likeliest", "unlikely", "impossible"])
    @pytest.mark.parametrize("draws", [1_000, 20_000])
    @pytest.mark.sampled(draws=1)
    def test_chi_square_of_the_first_two_tokens(self, params, draft, draws):
        """Pairs of tokens after a draft are distributed as p(first) p(second | first)."""
        vocabulary = 8
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(vocabulary + 1, vocabulary, generator=generator, dtype=torch.float64) * 1.5
        first = token_distribution(logits[0], params)
        second = torch.stack([token_distribution(row, params) for row in logits[1:]])
        order = first.argsort(descending=True)
        guess = int(order[{"likeliest": 0, "unlikely": 3, "impossible": -1}[draft]])

        seen = Counter[tuple[int, int]]()
        accepted = 0
        for start in range(0, draws, 1000):
            seeds = [replace(params, seed=seed) for seed in range(start, start + 1000)]
            # One verifying step of each: the distribution before the draft, and the one behind it.
            drawn = [
                sampled(logits[[row] * 1000], seeds, [position] * 1000).tolist()
                for position, row in ((0, 0), (1, 1 + guess))
            ]
            for i, param in enumerate(seeds):
                tokens = accepted_tokens((guess,), [drawn[0][i], drawn[1][i]], ())
                accepted += guess == tokens[0]
                if len(tokens) == 1:  # the next step, without a draft
                    tokens.append(int(sampled(logits[[1 + tokens[0]]], [param], [1])))
                seen[tokens[0], tokens[1]] += 1
        expected = (first[:, None] * second).flatten() * draws
        counts = torch.tensor([seen[i, j] for i in range(vocabulary) for j in range(vocabulary)])
        assert counts[expected == 0].sum() == 0
        possible = expected >= 5
        statistic = float(((counts - expected) ** 2 / expected)[possible].sum())
        freedom = int(possible.sum()) - 1
        # Wilson and Hilferty: the cube root of chi-square / freedom is all but normal; 4 deviations.
        spread = 2 / (9 * freedom)
        assert statistic < freedom * (1 - spread + 4 * spread**0.5) ** 3
        assert abs(accepted - draws * float(first[guess])) < 5 * (draws * 0.25) ** 0.5

    @pytest.mark.parametrize("drafter", [MixedDrafter, lambda: ms.NgramDrafter(2, 1), RightDrafter])
    def test_draws_are_those_of_plain_decoding(self, drafter):
        prompts = [random_tokens(n, seed=n) for n in (12, 30, 41)]
        params = [
            ms.SamplingParams(max_tokens=25, temperature=0.2, seed=1, return_log_probs=True),
            ms.SamplingParams(max_tokens=25, temperature=1.0, top_k=2, seed=2),
            ms.SamplingParams(max_tokens=25, temperature=1.2, top_p=0.7, seed=2),
        ]
        plain = small_engine().generate(prompts, params)
        engine = speculating(drafter)
        for a, b in zip(plain, engine.generate(prompts, params), strict=True):
            assert a.tokens == b.tokens
            np.testing.assert_allclose(a.log_probs or [], b.log_probs or [], rtol=0, atol=TOLERANCE)
        assert drafter is not RightDrafter or engine.stats().speculation.num_accepted > 5


@pytest.mark.usefixtures("kind")
class TestAnswers:
    @pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 20])
    def test_right_drafts_save_steps(self, most):
        engine, plain = speculating(most=most), small_engine()
        prompt = random_tokens(20, seed=1)
        steps = []
        for served in (engine, plain):
            served.add_request(prompt, ms.SamplingParams(max_tokens=22))
            steps.append(0)
            while served.has_unfinished_requests():
                served.step()
                steps[-1] += 1
        assert steps == [1 + -(-21 // (1 + most)), 22]
        stats = engine.stats().speculation
        assert (stats.num_decodes, stats.num_tokens) == (steps[0] - 1, 21)
        assert stats.num_drafted == stats.num_accepted == 21 - stats.num_decodes
        assert stats.acceptance == 1.0
        assert stats.tokens_per_decode == 21 / stats.num_decodes
        assert plain.stats().speculation == ms.SpeculationStats()
        engine.reset()
        assert engine.stats().speculation == ms.SpeculationStats(0, 0, 0, 0)

    def test_wrong_drafts_change_nothing(self):
        engine = speculating(WrongDrafter, most=4)
        serve_checked(engine, [random_tokens(n, seed=n) for n in (20, 33)], length=20)
        stats = engine.stats().speculation
        assert stats.num_accepted == 0
        assert stats.num_decodes == stats.num_tokens == 38

    @pytest.mark.parametrize("at", range(1, 12))
    def test_a_stop_token_among_accepted_drafts_ends_the_answer(self, at):
        prompt = random_tokens(13, seed=3)
        tokens, _ = expected_answer(tuple(prompt), 12)
        stop = tokens[at]
        engine = speculating(most=5)
        params = ms.SamplingParams(max_tokens=12, stop_token_ids=(stop,), return_log_probs=True)
        (result,) = engine.generate([prompt], params)
        assert result.tokens == tokens[: tokens.index(stop) + 1]
        assert len(result.log_probs) == len(result.tokens)
        assert result.finish_reason == "stop"
        history = prompt + result.tokens
        (again,) = serve_checked(engine, [[*history, 1, 2]])
        assert again.num_resumed_tokens == (len(history) - 1) // BLOCK * BLOCK

    @pytest.mark.parametrize("length", range(1, 9))
    def test_an_answer_is_never_longer_than_asked(self, length):
        engine = speculating(
            most=3, max_sequence_length=20 + length, num_kv_blocks=-(-(20 + length) // BLOCK)
        )
        (result,) = serve_checked(engine, [random_tokens(20, seed=2)], length=length)
        assert len(result.tokens) == length

    def test_streams_and_reports_get_every_token(self):
        engine = speculating()
        prompts = [random_tokens(20, seed=1), random_tokens(30, seed=2)]
        expected = [expected_answer(tuple(prompt), 10)[0] for prompt in prompts]
        params = ms.SamplingParams(max_tokens=10)
        stream = engine.stream(prompts[0], params)
        request_id = engine.add_request(prompts[1], params)
        arrived: list[int] = []
        while engine.has_unfinished_requests():
            report = engine.step()
            arrived += [token.token for token in report.tokens.get(request_id, ())]
        assert arrived == expected[1]
        assert [token.token for token in stream] == expected[0]

    def test_prompt_log_probs_go_along(self):
        prompt = random_tokens(21, seed=1)
        params = ms.SamplingParams(max_tokens=9, return_log_probs=True, skip_prompt_log_probs=False)
        plain, drafted = (e.generate([prompt], params)[0] for e in (small_engine(), speculating()))
        assert plain.tokens == drafted.tokens
        np.testing.assert_allclose(drafted.prompt_log_probs, plain.prompt_log_probs, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(drafted.log_probs, plain.log_probs, rtol=0, atol=TOLERANCE)


class Noted:
    """A drafter beside which one sees what it was asked."""

    def __init__(self, drafts: Sequence[int] = ()) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.drafts = drafts

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        self.asked.append((list(tokens), max_drafts))
        return self.drafts


class TestDrafters:
    def test_they_see_the_whole_sequence_and_what_may_be_used(self):
        noted = Noted()
        engine = speculating(lambda: noted, most=4)
        prompt = random_tokens(9, seed=1)
        (result,) = serve_checked(engine, [prompt], length=8)
        sequence = prompt + result.tokens
        assert noted.asked == [(sequence[: 10 + i], min(4, 6 - i)) for i in range(6)]

    @pytest.mark.parametrize("drafts", [[256], [-1], [1.5], "no", None, 7])
    def test_what_is_no_token_is_refused(self, drafts):
        engine = speculating(lambda: Noted(drafts))
        request_id = engine.add_request(random_tokens(9, seed=1))
        engine.step()
        with pytest.raises((ValueError, TypeError)):
            engine.step()
        engine.context.check_integrity()
        engine.cancel(request_id)

    @pytest.mark.parametrize("drafter", [7, ms.NgramDrafter, object()])
    def test_what_is_no_drafter_is_refused(self, drafter):
        config = ms.InferenceConfig(num_kv_blocks=8, num_mamba_slots=2, num_speculative_tokens=2)
        with pytest.raises(ValueError, match=r"drafter is .*; accepted: "):
            ms.DynamicInferenceEngine(small_model(), config, drafter=drafter)

    def test_a_drafter_without_drafts_is_refused(self):
        config = ms.InferenceConfig(num_kv_blocks=8, num_mamba_slots=2)
        with pytest.raises(ValueError, match="num_speculative_tokens 0; accepted: "):
            ms.DynamicInferenceEngine(small_model(), config, drafter=ms.NgramDrafter())

    @pytest.mark.parametrize("most", [-1, 64, 1.0, True, None])
    def test_the_setting_is_checked(self, most):
        with pytest.raises(ValueError, match=r"num_speculative_tokens is .*; accepted: "):
            small_engine(num_speculative_tokens=most)


@pytest.mark.usefixtures("kind")
class TestStates:
    @pytest.mark.sampled(drafter=2)
    @pytest.mark.parametrize("in_place", [False, True], ids=["separate", "in place"])
    @pytest.mark.parametrize("drafter", [RightDrafter, MixedDrafter, WrongDrafter])
    @pytest.mark.parametrize("slots", [2, 40])
    def test_a_boundary_holds_the_state_after_exactly_its_tokens(self, in_place, drafter, slots):
        """Every committed state is the recurrence's, at every step, also with several crossed in one."""
        plan = ms.CheckpointPlan.every_block(BLOCK)
        engine = speculating(drafter, most=11, in_place=in_place, checkpoint_plan=plan, num_mamba_slots=slots)
        prompt = random_tokens(13, seed=5)
        request_id = engine.add_request(prompt, ms.SamplingParams(max_tokens=40))
        answer = expected_answer(tuple(prompt), 40)[0]
        sequence = prompt + answer
        compared = 0
        while engine.has_unfinished_requests():
            request = engine.core.requests[request_id]
            engine.step()
            context = engine.context
            blocks = request.allocation.path.blocks if request.allocation else []
            for depth, block in enumerate(blocks, start=1):
                slot = context.prefix_cache.slots.cached_states.slot_of(block)
                if slot >= 0:
                    pool = context.memory.state_pool
                    expected = RecurrentLM(small_model()).states_after(sequence[: depth * BLOCK])
                    for name, states in expected.items():
                        stored = pool[name][:, pool.durable_index(slot)]
                        torch.testing.assert_close(stored, states, rtol=0, atol=1e-9)
                    compared += 1
        assert compared >= 5
        if slots == 40:
            assert resumable(engine.context, sequence) == 48

    def test_the_next_turn_resumes_from_a_boundary_crossed_by_drafts(self):
        for most in (2, 5, 15):
            engine, prompt = speculating(most=most), random_tokens(20, seed=1)
            (first,) = serve_checked(engine, [prompt], length=30)
            history = prompt + first.tokens
            (second,) = serve_checked(engine, [history + random_tokens(6, seed=2)])
            assert second.num_resumed_tokens == (len(history) - 1) // BLOCK * BLOCK

    def test_a_guess_evicts_no_state_and_a_boundary_reached_does(self):
        for drafter in (WrongDrafter, RightDrafter):
            engine = speculating(drafter, most=7, num_mamba_slots=2, max_requests=1)
            for seed in (1, 2):
                engine.generate([random_tokens(9, seed)], ms.SamplingParams(max_tokens=1))
            slots = engine.context.prefix_cache.slots
            assert len(slots.free_slots) == 8  # the live slots of the row
            prompt = random_tokens(5, seed=3)
            engine.add_request(prompt, ms.SamplingParams(max_tokens=5))
            evicted = []
            while engine.has_unfinished_requests():
                engine.step()
                evicted.append(slots.counts.evicted_total)
                assert slots.free_slots == [] or not engine.has_unfinished_requests()
            # Token 8, the last of a block, is computed in step 4 of plain decoding, and in step 2 by drafts.
            assert evicted == ([0, 0, 0, 1, 1] if drafter is WrongDrafter else [0, 1])
            assert resumable(engine.context, prompt + expected_answer(tuple(prompt), 5)[0]) == 8

    def test_a_state_in_place_of_which_another_came_is_still_the_requests_own(self):
        """Two requests say the same, in step: one commits the boundary, the other goes on from its state."""
        prompt = random_tokens(20, seed=4)
        for in_place in (False, True):
            engine = speculating(MixedDrafter, most=6, in_place=in_place)
            serve_checked(engine, [prompt, prompt, prompt], length=40)

    def test_separate_kernels_get_no_state_copied_and_others_once_before_and_once_after(self, monkeypatch):
        copies: list[int] = []
        original = StatePool.copy

        def counted(*args):
            copies.append(len(args[1]))
            original(*args)

        monkeypatch.setattr(StatePool, "copy", counted)
        prompts = [random_tokens(n, seed=n) for n in (12, 30, 41)]
        for in_place in (False, True):
            engine = speculating(MixedDrafter, most=5, in_place=in_place)
            for _ in range(2):
                for prompt in prompts:
                    engine.add_request(prompt, ms.SamplingParams(max_tokens=20))
                while engine.has_unfinished_requests():
                    copies.clear()
                    engine.step()
                    assert len(copies) <= (2 if in_place else 0)
            assert engine.context.cache_stats().num_resumed_tokens

    @pytest.mark.parametrize("most", [2, 5, 9])
    def test_requests_that_say_the_same_take_one_slot_a_boundary(self, most):
        engine = speculating(RightDrafter, most=most, num_mamba_slots=3)
        engine.generate([random_tokens(9, seed=9)], ms.SamplingParams(max_tokens=1))
        prompt = random_tokens(5, seed=4)
        serve_checked(engine, [prompt, prompt], length=40)
        slots = engine.context.prefix_cache.slots
        assert slots.counts.evicted_total == 0  # one state of another's, and the two's rolling one
        assert len(slots.cached_states.slot_of_block) == 2

    def test_after_a_reset_of_the_cache_requests_go_on_from_their_own_states(self):
        engine = speculating(most=3)
        prompts = [random_tokens(n, seed=n) for n in (14, 21)]
        params = ms.SamplingParams(max_tokens=30, return_log_probs=True)
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        results = {}
        while engine.has_unfinished_requests():
            results |= {result.request_id: result for result in engine.step().finished}
            engine.reset_prefix_cache()
            engine.context.check_integrity()
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert results[request_id].tokens == expected_answer(tuple(prompt), 30)[0]

    def test_live_slots_are_checked(self):
        engine = speculating()
        engine.add_request(random_tokens(9, seed=1))
        engine.step()
        context = engine.context
        (request,) = context.requests
        assert context.memory.state_pool.num_live == 4 * 4
        assert len(set(request.allocation.live_slots)) == 4
        live_slots = request.allocation.live_slots
        request.allocation.live_slots = live_slots[:-1]
        with pytest.raises(AssertionError, match="live slot"):
            context.check_integrity()
        request.allocation.live_slots = live_slots
        context.check_integrity()
        other = next(slot for slot in range(16) if slot not in request.allocation.live_slots)
        state, request.allocation.state_index = request.allocation.state_index, other
        with pytest.raises(AssertionError):
            context.check_integrity()
        request.allocation.state_index = state
        context.check_integrity()

    @pytest.mark.parametrize("value", [None, 1, "yes"])
    def test_the_models_word_is_checked(self, value):
        with pytest.raises(ValueError, match="separate_states is "):
            replace(small_model().state_spec(), separate_states=value)


@pytest.mark.usefixtures("kind")
class TestOthers:
    def test_drafts_take_only_blocks_without_a_holder_and_give_back_what_was_wrong(self):
        engine = speculating(WrongDrafter, most=20, num_kv_blocks=4, max_sequence_length=32)
        request_id = engine.add_request(random_tokens(7, seed=1), ms.SamplingParams(max_tokens=25))
        kv = engine.context.prefix_cache.kv_blocks
        request = engine.core.requests[request_id]
        while engine.has_unfinished_requests():
            engine.step()
            allocation = request.allocation
            num_held = len(allocation.path.blocks) if allocation else 0
            assert kv.num_held == num_held == (-(-allocation.num_computed // BLOCK) if allocation else 0)
            engine.context.check_integrity()

    @pytest.mark.sampled(drafter=1)
    @pytest.mark.parametrize("drafter", [WrongDrafter, MixedDrafter])
    def test_no_request_is_paused_or_evicted_sooner(self, drafter):
        """Wrong drafts, or none: the same requests wait in the same steps."""
        stories = []
        for engine in (
            speculating(drafter if drafter is WrongDrafter else WrongDrafter, most=5, **TIGHT),
            small_engine(**TIGHT),
        ):
            for seed in range(4):
                engine.add_request(random_tokens(20, seed), ms.SamplingParams(max_tokens=28))
            story = []
            while engine.has_unfinished_requests():
                report = engine.step()
                rows = sorted(request.request_id for request in engine.context.requests)
                story.append((report.admitted, rows, engine.stats().num_paused))
            stories.append(story)
        assert stories[0] == stories[1]
        assert any(paused for _, _, paused in stories[0])

    def test_drafts_take_what_tokens_are_left(self):
        engine = speculating(lambda: Noted([1] * 9), most=3, max_tokens_per_step=8, max_requests=2)
        drafted = []
        model = engine.model

        def watching(inputs: ms.StepInputs) -> torch.Tensor:
            real = sum(chunk.length for chunk in engine.context.batch)
            assert real <= 8
            drafted.append([len(chunk.drafts) for chunk in engine.context.batch])
            return model(inputs)

        watching.state_spec = model.state_spec
        engine.model = watching
        first, second = random_tokens(5, seed=1), random_tokens(13, seed=2)
        ids = [
            engine.add_request(prompt, ms.SamplingParams(max_tokens=9, return_log_probs=True))
            for prompt in (first, second)
        ]
        results = run_checked(engine)
        assert [results[i].tokens for i in ids] == [expected_answer(tuple(p), 9)[0] for p in (first, second)]
        assert [0, 0] in drafted  # while the second's prompt takes all the tokens there are
        assert [3, 3] in drafted


TIGHT = {"num_kv_blocks": 12, "max_requests": 4, "max_tokens_per_step": 24}


@pytest.mark.usefixtures("kind")
class TestContext:
    def started(self) -> tuple[ms.DynamicInferenceEngine, ScheduledRequest]:
        engine = speculating(lambda: Noted(), most=3)
        engine.add_request(random_tokens(9, seed=1), ms.SamplingParams(max_tokens=6))
        engine.step()
        (request,) = engine.context.requests
        chunk = engine.context.admission.schedule_request(request, 8)
        assert chunk is not None
        return engine, chunk

    def test_end_step_needs_what_stays(self):
        engine, chunk = self.started()
        context = engine.context
        drafted = context.admission.add_drafts(chunk, [1, 2, 3])
        assert (drafted.drafts, drafted.length, drafted.samples_token) == ((1, 2, 3), 4, True)
        context.begin_step([drafted])
        context.end_step({0: 1})
        context.check_integrity()
        assert chunk.request.allocation.num_computed == 10

    def test_a_chunk_of_a_prompt_takes_no_drafts(self):
        engine = speculating(lambda: Noted(), most=3)
        engine.add_request(random_tokens(9, seed=1))
        (request,) = engine.core.scheduler.waiting.values()
        chunk = engine.context.admission.schedule_request(request, 64)
        assert chunk.max_drafts(3) == 0


class Recorded:
    """In the place of a captured graph: runs the model on the tensors that it was captured with."""

    def __init__(self, model, inputs: ms.StepInputs, pool: object) -> None:
        self._model, self._inputs, self.pool = model, inputs, pool

    def launch(self) -> torch.Tensor:
        return self._model(self._inputs)


@pytest.mark.usefixtures("kind")
class TestGraphs:
    def test_drafted_steps_run_by_graph_padded_to_all_the_drafts_there_may_be(self, monkeypatch):
        monkeypatch.setattr(cuda_graphs, "CapturedForward", Recorded)
        engine = speculating(MixedDrafter, most=3)
        fix_addresses(engine.context._buffer)
        engine.core.step_runner.graphs = GraphRunner(
            engine.context.spec, GraphBuckets.of(engine.context), 100
        )
        prompts = [random_tokens(n, seed=n) for n in (37, 5, 64, 20)]
        for _ in range(3):
            params = ms.SamplingParams(max_tokens=25, return_log_probs=True)
            engine.add_request(random_tokens(9, seed=9), params)
            for _ in range(2):  # decodes beside the prefills that come next
                engine.step()
            serve_checked(engine, prompts, length=20)
        widths = {
            (shape.decode_tokens, shape.prefills == 0) for shape in engine.core.step_runner.graphs.shapes
        }
        assert widths >= {(4, True), (4, False), (1, False)}
        assert {shape.decode_tokens for shape in engine.core.step_runner.graphs.shapes} <= {1, 4}
