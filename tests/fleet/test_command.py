"""`mambaslots serve --replicas` in a process of its own, with real signals."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = "a:key-of-a\nb:key-of-b\n"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    fleet = "--threads 1 --replicas 2 --ingresses 2"
    sizes = "--num-kv-blocks 256 --num-mamba-slots 32 --max-requests 4 --max-sequence-length 1024"
    command = f"serve models/tiny-code --device cpu --dtype float64 {sizes} {fleet} --port 0"
    process = subprocess.Popen(
        [sys.executable, "-m", "mambaslots", *command.split(), "--api-keys", str(keys), "--trace"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT / "stubs"), "MAMBASLOTS_ADMIN_KEY": "admin"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("mambaslots serves tiny-code at http://127.0.0.1:"):
                assert line.endswith("with 2 replicas\n")
                yield process, int(line.split()[4].rpartition(":")[2])
                break
        else:
            pytest.fail(process.communicate()[1])
    finally:
        process.kill()
        process.wait()


def ask(port: int, body: dict[str, object] | None, key: str, path: str = "/v1/completions") -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        content: bytes = reply.read()
        return content


def cached(reply: bytes) -> int:
    return json.loads(reply)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_no_state_and_a_signal_drains(started: tuple[subprocess.Popen[str], int]) -> None:
    process, port = started
    body = {"prompt": "def count_words(path):\n    " * 6, "max_tokens": 8, "temperature": 0}
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, body, "no-key")
    refused.value.close()
    assert refused.value.code == 401
    assert [cached(ask(port, body, f"key-of-{tenant}")) > 0 for tenant in "aabb"] == [
        False,
        True,
        False,
        True,
    ]

    replies: list[bytes] = []
    long = body | {"max_tokens": 300, "stream": True, "stop": []}
    answering = threading.Thread(target=lambda: replies.append(ask(port, long, "key-of-a")))
    answering.start()
    assert process.stdout is not None
    while b"mambaslots_fleet_requests_running 1" not in metrics(port):
        pass
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM; running requests have 30 s" in process.stdout.readline()
    answering.join(60)
    assert replies[0].endswith(b"data: [DONE]\n\n")
    code = process.wait(60)
    _, errors = process.communicate()
    assert code == 0, errors
    assert '"prompt_tokens"' in errors or '"tokens' in errors  # what --trace writes
    assert "Traceback" not in errors


def metrics(port: int) -> bytes:
    return ask(port, None, "admin", "/metrics")
