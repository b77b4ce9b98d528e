"""The main job, small, as a user starts it; and the oracle that it measures the cache with."""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import mambaslots as ms
import pytest
import serve_conversations
import torch
from conversation_texts import SYSTEM_PROMPTS, conversations
from ideal_resume import IdealResume
from oracle.fresh_process import run_script
from oracle.recurrent_lm import RecurrentLM
from serve_conversations import Run, Server, compare_with_cpu, make_engine

ROOT = Path(__file__).parents[3]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.sampled(plan=("every-block",))
@pytest.mark.parametrize("plan", ["default", "every-block"])
def test_a_small_run(plan: str, tmp_path: Path) -> None:
    figures_path, plot_path = tmp_path / "figures.json", tmp_path / "plot.png"
    arguments = ["--conversations", "2", "--turns", "2"]
    arguments += [
        "--answer-tokens",
        "8",
        "--plan",
        plan,
        "--json",
        str(figures_path),
        "--plot",
        str(plot_path),
    ]
    run = run_script("examples/serve_conversations.py", *arguments, warm=plan == "every-block")

    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("mambaslots: live states")
    assert lines[-1] == "outputs identical: yes"
    assert any(line.startswith("def ") for line in answers(lines)), run.stdout
    assert plot_path.read_bytes().startswith(PNG_SIGNATURE)

    figures = json.loads(figures_path.read_text())
    assert figures["outputs_identical"] is True
    assert figures["plan"] == plan
    assert figures["max_log_prob_difference"] < 1e-9
    assert len(figures["turns"]) == 4
    assert set(figures["computed_by_reason"]) == set(ms.COMPUTE_REASONS)
    assert figures["versions"]["torch"] == torch.__version__
    for part in (figures, *figures["turns"]):
        computed = sum(part["computed_by_reason"].values())
        assert part["prompt_tokens"] == part["num_resumed_tokens"] + computed
    for name in ("prompt_tokens", "num_resumed_tokens", "ideal_resumed_tokens"):
        assert figures[name] == sum(turn[name] for turn in figures["turns"])
    assert 0 < 0.92 * figures["ideal_resumed_tokens"] <= figures["num_resumed_tokens"]
    for run_name in ("without_cache", "with_cache"):
        assert figures["ttft_ms"][run_name]["mean"] > 0


def answers(lines: list[str]) -> list[str]:
    """The lines of answers in the conversation that is shown."""
    starts = [number + 1 for number, line in enumerate(lines) if line.startswith("[answer")]
    return [line for start in starts for line in itertools.takewhile(bool, lines[start:])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], "argument --turns: '0'; accepted: an integer >= 1"),
        (["--seed", "-1"], "argument --seed: '-1'; accepted: an integer >= 0"),
        (["--json", "no/such/folder.json"], "accepted: a path in an existing directory"),
        (["--plot", "out.xyz"], "argument --plot: 'out.xyz'; accepted: a path that ends in one of "),
        (["--plot", "out"], "argument --plot: 'out'; accepted: a path that ends in one of "),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_arguments_are_checked(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_conversations.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        serve_conversations.parse_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_conversations.py", "--device", "cuda"])
    with pytest.raises(SystemExit, match="2"):
        serve_conversations.parse_arguments()
    assert "argument --device: 'cuda', and torch sees no GPU; accepted: cpu" in capsys.readouterr().err


def test_conversations_are_deterministic_and_varied() -> None:
    users = conversations(20, 8, seed=3)
    assert users == conversations(20, 8, seed=3)
    assert users != conversations(20, 8, seed=4)
    assert {user.system_prompt for user in users} == set(SYSTEM_PROMPTS)
    assert len({turn.text for user in users for turn in user.turns}) > 80
    assert {turn.temperature is None for user in users for turn in user.turns} == {True, False}


def test_nothing_computed_nothing_to_resume() -> None:
    assert IdealResume(4).ideal(range(20)) == 0


@pytest.mark.parametrize(
    ("computed", "prompt", "ideal"),
    [
        (range(20), range(20), 16),  # a repeat: the last token is computed again
        (range(16), range(17), 16),
        (range(16), range(16), 12),  # N is a boundary, and N-1 is before it
        (range(15), range(20), 12),  # 15 tokens are known, three whole blocks
        ([*range(9), 99, *range(10, 20)], range(20), 8),  # they fork in the third block
        ([99, *range(1, 20)], range(20), 0),
        (range(3), range(20), 0),
        (range(20), [0], 0),
    ],
)
def test_deepest_boundary_of_the_common_prefix(
    computed: list[int] | range, prompt: list[int] | range, ideal: int
) -> None:
    oracle = IdealResume(4)
    oracle.computed("a", computed)
    assert oracle.ideal(prompt) == ideal


def test_the_best_of_all_sequences_counts() -> None:
    oracle = IdealResume(4)
    oracle.computed("a", range(8))
    oracle.computed("b", [*range(13), 99])
    oracle.computed("c", [99, *range(13)])
    assert oracle.ideal(range(20)) == 12


def test_a_request_grows_and_never_shrinks() -> None:
    oracle = IdealResume(4)
    oracle.computed("a", range(5))
    assert oracle.ideal(range(20)) == 4
    oracle.computed("a", range(13))
    assert oracle.ideal(range(20)) == 12
    oracle.computed("a", range(4))  # evicted, and started again
    assert oracle.ideal(range(20)) == 12


def test_salts_are_kept_apart() -> None:
    oracle = IdealResume(4)
    oracle.computed("a", range(12), "tenant")
    assert oracle.ideal(range(20)) == 0
    assert oracle.ideal(range(20), b"other") == 0
    assert oracle.ideal(range(20), b"tenant") == 12
    oracle.computed("b", range(8), None)
    assert oracle.ideal(range(20), b"") == 8


def test_the_oracle_agrees_with_the_engine() -> None:
    """A repeat after its first way through resumes exactly what the oracle allows."""
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(torch.float64))
    config = ms.InferenceConfig(
        block_size_tokens=32,
        max_requests=2,
        max_tokens_per_step=64,
        max_sequence_length=256,
        num_kv_blocks=16,
        num_mamba_slots=16,
    )
    engine, oracle = ms.DynamicInferenceEngine(model, config), IdealResume(32)
    prompt = list(range(150))
    answer = engine.generate([prompt], ms.SamplingParams(max_tokens=20))[0].tokens
    oracle.computed(0, [*prompt, *answer[:-1]])
    for longer in (prompt, [*prompt, *answer], [*prompt, *answer, 1, 2, 3]):
        assert engine.generate([longer])[0].num_resumed_tokens == oracle.ideal(longer) > 0


def make_small_model() -> ms.models.HybridLM:
    """A random model with the vocabulary of the demo's."""
    return ms.models.HybridLM(ms.models.HybridConfig.tiny(torch.float32, vocab_size=264))


@pytest.fixture(scope="module")
def served() -> tuple[ms.DynamicInferenceEngine, Run]:
    users = conversations(2, 3, seed=1)
    turns = {u: tuple(replace(t, temperature=None, answer_tokens=9) for t in u.turns) for u in users}
    users = [replace(u, turns=turns[u]) for u in users]
    engine = make_engine(make_small_model(), users, None)
    return engine, Server("CPU", engine, users).serve(progress=False)


class TestComparisonWithTheCpu:
    """Answers of a run on another device, held against a CPU run by the rule of float32."""

    def other(self, run: Run, key: tuple[int, int], place: int) -> Run:
        """As `run`, but for one token of one answer, and all that comes after it in its conversation."""
        results = dict(run.results)
        for turn in range(key[1], 3):
            result = results[key[0], turn]
            tokens = list(result.tokens)
            tokens[place] = (tokens[place] + 1) % 256
            results[key[0], turn] = replace(result, tokens=tokens)
        return Run("other", results)

    def test_the_same_run_is_the_same(self, served):
        comparison = compare_with_cpu(*served, served[1])
        assert asdict(comparison) == {
            "same": 6, "ties": 0, "faults": 0, "after_a_difference": 0, "gaps": [],
        }  # fmt: skip

    @pytest.mark.sampled(place=(-1,))
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_difference_is_a_fault_or_a_tie_by_what_the_model_prefers(self, served, place, monkeypatch):
        engine, run = served
        other = self.other(run, (1, 1), place)
        comparison = compare_with_cpu(engine, run, other)
        assert (comparison.same, comparison.faults, comparison.ties) == (4, 1, 0)
        assert comparison.after_a_difference == 1
        (gap,) = comparison.gaps
        right, got = run.results[1, 1], other.results[1, 1]
        context = [*run.prompts[1, 1], *right.tokens][: len(run.prompts[1, 1]) + place % len(right.tokens)]
        log_probs = RecurrentLM(engine.model).logits(context)[-1].log_softmax(-1)
        preferred = float(log_probs[right.tokens[place]] - log_probs[got.tokens[place]])
        assert gap == pytest.approx(preferred, abs=1e-3)
        monkeypatch.setattr(serve_conversations, "TIE", gap + 1e-3)
        assert compare_with_cpu(engine, run, other).ties == 1


@pytest.mark.gpu
def test_a_small_run_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "examples/serve_conversations.py", "--device", "cuda", "--json", str(path)]
    run = subprocess.run(
        [*command, "--conversations", "2", "--turns", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "the CPU's tokens, by the rule of float32: yes"
    figures = json.loads(path.read_text())
    assert figures["dtype"] == "float32"
    for name in ("without_cache_beside_the_CPU", "with_cache_beside_the_CPU"):
        assert figures[name]["faults"] == 0
        assert figures[name]["same"] > 0
