"""`torchrun -m mambaslots serve`: the model is split over the ranks, and rank 0 answers."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.cli.main import main

MODEL = Path(__file__).parents[3] / "models/tiny-code"
STARTING_S = 120.0


@pytest.mark.long
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    serve = ["-m", "mambaslots", "serve", str(MODEL), "--port", "0", "--device", "cpu", "--threads", "1"]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*torchrun, *serve], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTING_S
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        body = {"prompt": "class Tree:", "max_tokens": 24, "temperature": 0}
        request = urllib.request.Request(
            f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "Traceback" not in log.read_text().partition("death signal")[0]
    loaded = ms.load(MODEL)
    engine = ms.DynamicInferenceEngine(
        loaded.model, ms.InferenceConfig(block_size_tokens=32, num_kv_blocks=32, num_mamba_slots=8)
    )
    params = ms.SamplingParams(max_tokens=24)
    (expected,) = engine.generate([loaded.codec.encode("class Tree:")], params)
    assert text == loaded.codec.decode(expected.tokens)


def test_replicas_under_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["serve", str(MODEL), "--tp", "2"]) == 2
    assert "--replicas or --tp is given under torchrun" in capsys.readouterr().err
