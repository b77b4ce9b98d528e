"""The command line: what it accepts, how it says mistakes, and what its options become."""

import importlib.metadata
import io
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.cli import serve
from mambaslots.cli.engine_setup import inference_config
from mambaslots.cli.main import COMMANDS, main, make_parser
from mambaslots.cli.options import chosen_model
from mambaslots.cli.serve import read_keys, server_settings
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.replay.read_trace import read_trace

DRAFTS = ("--num-speculative-tokens", "4")
MODEL = str(Path(__file__).parents[3] / "models/tiny-code")


def config_of(*options: str, memory_gb: float = 1.0, **model: Any) -> ms.InferenceConfig:
    spec = ms.models.HybridLM(ms.models.HybridConfig.tiny(**model), seed=0).state_spec()
    words = ["serve", MODEL, "--memory-gb", str(memory_gb), *options]
    options = make_parser().parse_args(words)
    return inference_config(spec, options, 8192, chosen_model(options)[1])


def test_python_m_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mambaslots", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mambaslots {importlib.metadata.version('mambaslots')}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND; accepted: serve, chat, replay, doctor, run"),
        (["serv"], "argument COMMAND: invalid choice: 'serv'"),
        (["serve"], "the following arguments are required: MODEL"),
        (["serve", MODEL, "--port", "x"], "argument --port: 'x'; accepted: an integer from 0 to 65535"),
        (["serve", MODEL, "--port", "99999"], "argument --port: '99999'; accepted: an integer from 0"),
        (["serve", MODEL, "--memory-gb", "nan"], "argument --memory-gb: 'nan'; accepted: a number > 0"),
        (["serve", MODEL, "--max-req", "3"], "unrecognized arguments: --max-req 3"),
        (["serve", MODEL, "--api-keys", "/no"], "argument --api-keys: '/no'; accepted: a file"),
        (
            ["serve", MODEL, "--record", __file__],
            f"argument --record: {__file__!r}; accepted: a path where no",
        ),
        (["run", "/no/script"], "/no/script is no file; usage: mambaslots run"),
        (["run", "--json", "/no/x", __file__], "mambaslots.mcore: argument --json: /no/x; accepted: a path"),
        (["run", "--json", 300 * "a", __file__], "accepted: a path in an existing directory"),
        (["replay", "--json", 300 * "a"], "accepted: a path in an existing directory"),
        (["serve", MODEL, "--disk", "x"], "argument --disk: 'x'; accepted: a directory and GB"),
        (["replay", "--trace", 300 * "a"], "accepted: chat, "),
        (["serve", MODEL, "--api-keys", 300 * "a"], "accepted: a file"),
        (["serve", MODEL, "--record", 300 * "a"], "accepted: a path in an existing directory"),
        (["doctor", "--json", "/no/x"], "argument --json: '/no/x'; accepted: a path in an existing dir"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert stderr.startswith("mambaslots")
    assert said in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", "/no/model"], "mambaslots chat: '/no/model' is no folder"),
        (["chat", MODEL, "--num-mamba-slots", "4"], "mambaslots chat: --num-kv-blocks is missing"),
        (
            ["chat", MODEL, "--memory-gb", "0.001"],
            "mambaslots chat: --memory-gb is 0.001; accepted: at least",
        ),
        (
            ["serve", MODEL, "--port", "0", "--eviction", "README.md:X"],
            "mambaslots serve: --eviction is 'README.md:X'; accepted: ",
        ),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(said)
    assert stderr.count("\n") == 1


def test_debug_output_has_the_traceback_too(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("DEBUG"):
        assert main(["chat", "/no/model"]) == 2
    assert "Traceback" in caplog.text
    assert capsys.readouterr().err.startswith("mambaslots chat: '/no/model' is no folder")


MISTAKES = (
    ["serve"],
    ["serve", "."],
    ["serve", "llama"],
    ["serve", "some/model"],
    ["serve", MODEL, "--plan", "x"],
    ["serve", MODEL, "--eviction", "x"],
    ["serve", MODEL, "--num-mamba-slots", "4"],
    ["serve", MODEL, "--api-keys", "config.json"],
    ["serve", MODEL, "--replicas", "2", "--record", "trace"],
    ["chat", MODEL, "--no-such-option"],
    ["chat", "llama"],
    ["chat", MODEL, "--plan", "x"],
    ["doctor", "--no-such-option"],
    ["doctor", "--json", "/no/x"],
    ["replay", "--trace", "x"],
    ["replay", "--state-dtype", "x"],
    ["replay", "--plan", "x"],
    ["replay", "--policy", "x"],
    ["replay", "--model", "x"],
    ["replay", "--model", "llama"],
    ["run"],
    ["run", "/no/script"],
    ["run", "--plan", "x", "config.json"],
)


HELP = (["--help"], *([command, "--help"] for command in COMMANDS))


@pytest.mark.parametrize("words", [*HELP, *MISTAKES], ids=str)
def test_help_and_mistakes_need_no_torch(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    script = (
        f"import sys\nfrom mambaslots.cli.main import main\n"
        f"try: sys.exit(main({words}))\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "AssertionError" not in done.stderr
    if "--help" in words:
        assert done.returncode == 0
    else:
        assert done.returncode == (1 if "some/model" in words else 2)
        assert re.fullmatch(r"mambaslots[^\n]*\n", done.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    for word in ("serve", "chat", "replay", "doctor", "run", "--max-requests"):
        assert word in script


def test_options_are_fields_of_the_configuration() -> None:
    config = config_of(
        "--num-mamba-slots", "7", "--num-kv-blocks", "99", "--max-requests", "3", "--block-size-tokens", "32",
        "--max-tokens-per-step", "96", "--max-sequence-length", "500", "--num-speculative-tokens", "2",
        "--durable-state-dtype", "int8", "--free-memory", "zero",
    )  # fmt: skip
    assert config == ms.InferenceConfig(
        num_mamba_slots=7, num_kv_blocks=99, max_requests=3, block_size_tokens=32, max_tokens_per_step=96,
        max_sequence_length=500, num_speculative_tokens=2, durable_state_dtype="int8",
        free_memory="zero",
    )  # fmt: skip


def test_the_policy_and_the_plan_of_a_cache_are_options(tmp_path: Path) -> None:
    sizes = ("--num-mamba-slots", "7", "--num-kv-blocks", "99")
    tiers = ("--host-gb", "0.5", "--disk", f"{tmp_path}:2")
    config = config_of(*sizes, *tiers, "--plan", "every=64", "--eviction", "lru")
    assert (config.checkpoint_plan.decode, config.checkpoint_plan.prefill_interval) == (64, 64)
    assert (config.eviction_policy, config.host_cache_gb) == ("lru", 0.5)
    assert config.disk_cache == (str(tmp_path), 2.0)
    (tmp_path / "mine.py").write_text(
        "from mambaslots import CheckpointPlan\n\n\nclass Mine(CheckpointPlan):\n    pass\n"
    )
    plan = config_of(*sizes, "--plan", f"{tmp_path}/mine.py:Mine").checkpoint_plan
    assert type(plan).__name__ == "Mine"
    with pytest.raises(ValueError, match="plan has 'x'; accepted: fields of CheckpointPlan"):
        config_of(*sizes, "--plan", "x")
    with pytest.raises(SystemExit):
        config_of(*sizes, "--disk", "2")


@pytest.mark.sampled
@pytest.mark.parametrize("pattern", ["M-M*-M-", "MM", "**", "G*"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-prefix-caching",),
        DRAFTS,
        ("--batch-invariant", "--max-requests", "40"),
        ("--durable-state-dtype", "int8"),
        ("--free-memory", "zero"),
    ],
)
@pytest.mark.parametrize("memory_gb", [0.05, 0.4])
def test_a_budget_is_kept_and_serves(pattern: str, options: tuple[str, ...], memory_gb: float) -> None:
    extra = {"delta_num_key_heads": 2, "delta_key_dim": 16, "delta_num_value_heads": 4, "delta_value_dim": 16}
    model = {"pattern": pattern} | (extra if "G" in pattern else {})
    config = config_of("--max-sequence-length", "512", *options, memory_gb=memory_gb, **model)
    spec = ms.models.HybridLM(ms.models.HybridConfig.tiny(**model), seed=0).state_spec()
    context = DynamicInferenceContext(spec, config)
    blocks, slots = context.prefix_cache.kv_blocks.total_count, context.prefix_cache.slots.num_slots
    said = re.search(r"total ([\d.e+]+) MiB", context.memory.summary())
    assert said is not None
    assert float(said[1]) <= 1.001 * 1024 * memory_gb  # four digits are printed
    assert blocks * config.block_size_tokens >= config.max_sequence_length
    assert (slots > 0) == config.enable_prefix_caching


def test_options_of_the_server_are_its_settings() -> None:
    words = [
        "--host", "::1", "--port", "0", "--max-body-mb", "2", "--body-timeout-s", "3", "--allowed-host", "a",
        "--allowed-host", "b", "--allowed-origin", "https://c", "--trace", "--max-waiting-requests", "7",
    ]  # fmt: skip
    settings = server_settings(make_parser().parse_args(["serve", MODEL, *words]))
    assert (settings.host, settings.port, settings.max_body_bytes) == ("::1", 0, 2 << 20)
    assert (settings.body_timeout_s, settings.allowed_hosts) == (3.0, ("a", "b"))
    assert (settings.allowed_origins, settings.trace) == (("https://c",), True)
    assert settings.max_waiting_requests == 7
    assert server_settings(make_parser().parse_args(["serve", MODEL])).max_body_bytes is None


def test_a_port_in_use_is_refused_before_the_model_is_loaded_by_the_rank_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", MODEL, "--port", str(taken.getsockname()[1])]
        options = make_parser("serve").parse_args(words)
        said = rf"^cannot listen at 127\.0\.0\.1:{taken.getsockname()[1]}: Address already in use$"
        with pytest.raises(OSError, match=said):
            serve._checked_settings(options)
        monkeypatch.setenv("RANK", "1")
        serve._checked_settings(options)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_file_is_run_and_the_hub_asked_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: (asked.append(name), MODEL)[1])
    policies: list[Any] = []
    monkeypatch.setattr(
        "mambaslots.serve.serve",
        lambda engine, *others: (policies.append(engine.config.eviction_policy), 0)[1],
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    policy, ran = tmp_path / "mine.py", tmp_path / "ran"
    policy.write_text(
        "from mambaslots.inference.contexts.cache.eviction import LRUEviction\n\n"
        "class Mine(LRUEviction):\n    pass\n\n"
        f"with open({str(ran)!r}, 'a') as file:\n    file.write('1')\n"
    )
    words = ["--memory-gb", "0.05", "--device", "cpu", "--eviction", f"{policy}:Mine"]
    assert main([command, "someone/tiny-code", *words, *(["--port", "0"] if command == "serve" else [])]) == 0
    assert (asked, ran.read_text()) == (["someone/tiny-code"], "1")
    assert [type(policy).__name__ for policy in policies] == ["Mine"] * (command == "serve")


def test_a_port_in_use_is_refused_before_a_model_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: pytest.fail("it was downloaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "someone/tiny-code", "--port", str(taken.getsockname()[1])]) != 0
    assert "cannot listen at" in capsys.readouterr().err


def test_the_port_of_a_cluster_that_is_joined_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray Serve, which listens there for all its applications."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", MODEL, "--replicas", "2", "--port", str(taken.getsockname()[1])]
        serve._checked_settings(make_parser("serve").parse_args(words))


def test_traffic_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_once(engine: ms.DynamicInferenceEngine, *others: object) -> int:
        engine.generate([[1, 2, 3]], ms.SamplingParams(max_tokens=2))
        return 7

    monkeypatch.setattr("mambaslots.serve.serve", serve_once)
    path = tmp_path / "traffic.jsonl"
    words = ["serve", MODEL, "--port", "0", "--memory-gb", "0.05", "--device", "cpu", "--record", str(path)]
    assert main(words) == 7
    (request,) = read_trace(path).requests
    assert (len(request.prompt), len(request.answer)) == (3, 2)


def test_keys_of_tenants_are_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# who: what\n\nalice: one:with:colons\nbob:two\n")
    keys = read_keys(tmp_path / "keys")
    assert keys == {"alice": "one:with:colons", "bob": "two"}
    options = make_parser().parse_args(["serve", MODEL, "--api-keys", str(tmp_path / "keys")])
    assert server_settings(options).api_keys == keys
    assert server_settings(options).model_name == "tiny-code"


@pytest.mark.parametrize("text", ["", "alice", ":key", "alice:", "a:k\na:l", "a:k\nb:k"])
def test_keys_that_name_no_tenant_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="accepted"):
        read_keys(tmp_path / "keys")
