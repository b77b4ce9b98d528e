"""`mambaslots serve --replicas`: what the command line makes of its options. Nothing starts Ray."""

import argparse
import builtins
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mambaslots.cli.main import main, make_parser
from mambaslots.cli.serve_processes import ReplicaEngineFactory, _only_data, weights_version
from mambaslots.fleet import FleetSettings
from mambaslots.loaded_model import LoadedText

MODEL = "models/tiny-code"
SIZES = ["--device", "cpu", "--num-kv-blocks", "64", "--num-mamba-slots", "8", "--max-sequence-length", "512"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--replicas", "0"],
            "argument --replicas: '0'; accepted: an integer >= 1, or two of them, as in 1:4",
        ),
        (["--replicas", "4:1"], "argument --replicas: '4:1'; accepted"),
        (["--replicas", "1:"], "argument --replicas: '1:'; accepted"),
        (["--replicas", "2", "--tp", "0"], "argument --tp: '0'; accepted"),
    ],
)
def test_wrong_numbers_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", MODEL, *words])
    assert said in capsys.readouterr().err


def test_what_makes_no_sense_together_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, "--port", "0", "--replicas", "2", "--record", str(tmp_path / "trace")]) == 2
    assert "--record and --replicas are both given" in capsys.readouterr().err
    assert main(["serve", "/no/model", "--port", "0", "--replicas", "2"]) == 2
    assert "'/no/model' is no folder" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = builtins.__import__

    def without_ray(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return imported(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    assert main(["serve", MODEL, "--port", "0", "--replicas", "2"]) == 1
    assert "pip install 'mambaslots[fleet]'" in capsys.readouterr().err


def test_options_reach_replicas_and_secrets_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: dict[str, Any] = {}

    def serve_replicas(
        make: ReplicaEngineFactory, text: Callable[[], LoadedText], salt_key: str, *settings: Any, device: str
    ) -> int:
        called.update(make=make, text=text, salt_key=salt_key, settings=settings, device=device)
        return 7

    monkeypatch.setattr("mambaslots.fleet.fleet_server.serve_replicas", serve_replicas)
    monkeypatch.delenv("MAMBASLOTS_SALT_KEY", raising=False)
    (tmp_path / "keys").write_text("alice:the-key-of-alice\n")
    words = ["--replicas", "2:5", "--tp", "2", "--ingresses", "2", "--max-requests", "6", "--trace"]
    assert main(["serve", MODEL, *SIZES, *words, "--port", "0", "--api-keys", str(tmp_path / "keys")]) == 7
    server, fleet = called["settings"]
    assert server.api_keys == {"alice": "the-key-of-alice"}
    assert fleet == FleetSettings(
        model_name="tiny-code", min_replicas=2, max_replicas=5, ranks=2, ingresses=2,
        max_requests=6, trace=True,
    )  # fmt: skip
    data = pickle.dumps((called["make"], called["text"]))
    assert b"alice" not in data
    make, text = pickle.loads(data)
    monkeypatch.setenv("MAMBASLOTS_SALT_KEY", "is replaced by that of all replicas")
    engine = make()
    assert os.environ["MAMBASLOTS_SALT_KEY"] == called["salt_key"]
    assert engine.config.max_requests == 6
    assert engine.weights_version == weights_version(Path(MODEL))
    assert text().text is not None
    assert called["salt_key"] not in repr(make)


@pytest.mark.parametrize("rank", [None, "0"])
def test_ingresses_need_replicas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str | None
) -> None:
    """Under torchrun, too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank) if rank is not None else monkeypatch.delenv(name, raising=False)
    assert main(["serve", MODEL, "--ingresses", "2"]) == 2
    assert "--ingresses is 2 without --replicas; accepted: both, or neither" in capsys.readouterr().err


def test_options_for_another_process_are_data() -> None:
    options = make_parser().parse_args(["serve", MODEL])
    assert isinstance(pickle.loads(pickle.dumps(_only_data(options))), argparse.Namespace)


def test_the_weights_version_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    before = weights_version(tmp_path)
    (tmp_path / "notes.txt").write_text("ignored")
    assert weights_version(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(bytes(299_999) + b"1")
    assert weights_version(tmp_path) != before
