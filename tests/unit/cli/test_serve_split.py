"""`torchrun -m mambaslots serve`: the model is split over the ranks, and rank 0 answers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.cli.main import main

MODEL = Path(__file__).parents[3] / "models/tiny-code"
STARTING_S = 120.0


@contextmanager
def two_ranks(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """torchrun with two ranks that serve, which write to `log`, and their address."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    serve = ["-m", "mambaslots", "serve", str(MODEL), "--port", "0", "--device", "cpu", "--threads", "1"]
    with log.open("w") as file:
        process = subprocess.Popen([*torchrun, *serve], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTING_S
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.long
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with two_ranks(log) as (_, address):
        body = {"prompt": "class Tree:", "max_tokens": 24, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
    assert "Traceback" not in log.read_text().partition("death signal")[0]
    loaded = ms.load(MODEL)
    engine = ms.DynamicInferenceEngine(
        loaded.model, ms.InferenceConfig(block_size_tokens=32, num_kv_blocks=32, num_mamba_slots=8)
    )
    params = ms.SamplingParams(max_tokens=24)
    (expected,) = engine.generate([loaded.codec.encode("class Tree:")], params)
    assert text == loaded.codec.decode(expected.tokens)


@pytest.mark.long
@pytest.mark.parametrize(("lost", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)])
def test_where_a_rank_is_lost_all_ranks_end(tmp_path: Path, lost: int, number: signal.Signals) -> None:
    """torchrun ends them all once a rank that lives has named the lost one and ended."""
    log = tmp_path / "log"
    with two_ranks(log) as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        rank = f"\0RANK={lost}\0".encode()
        (pid,) = [int(one) for one in children if rank in Path(f"/proc/{one}/environ").read_bytes()]
        os.kill(pid, number)
        assert process.wait(13 + 5 + 30 + STARTING_S)  # silence, last answers, what torchrun waits
        assert number == signal.SIGKILL or f"mambaslots serve: rank {lost} died" in log.read_text()
        assert not Path(f"/proc/{pid}").exists()


def test_replicas_under_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["serve", str(MODEL), "--port", "0", "--tp", "2"]) == 2
    assert "--replicas or --tp is given under torchrun" in capsys.readouterr().err
