"""Run load generators of others against a server of the small model, and print what each says at its end.

    python tools/client_tools.py --seconds 60 guidellm=/venvs/guidellm/bin aiperf=/venvs/aiperf/bin

Each tool has its own environment: `python -m venv DIR`, then `DIR/bin/pip install 'guidellm==0.8.*'` (or
`aiperf`, `vllm`). The exit code is 1 if a tool fails.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-code"
TOKENIZER = "local/tiny-code"  # as a name on the hub; see `_hub_of`
COMMANDS = {
    "guidellm": (
        "guidellm run --backend kind=openai_http,target={url},model=tiny-code "
        "--profile kind=concurrent,streams=4 --constraint kind=max_duration,seconds={seconds} "
        "--tokenizer kind=huggingface_auto,model={tokenizer} "
        "--data kind=synthetic_text,prompt_tokens=200,output_tokens=40 --disable-progress"
    ),
    "aiperf": (
        "aiperf profile --model tiny-code --url {url} --endpoint-type chat --streaming "
        "--tokenizer {tokenizer} --concurrency 4 --benchmark-duration {seconds} --isl 200 --osl 40 --ui none"
    ),
    "vllm": (
        "vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {url} "
        "--model tiny-code --tokenizer {tokenizer} --dataset-name random --random-input-len 200 "
        "--random-output-len 40 --num-prompts 100 --max-concurrency 4"
    ),
}


def main() -> int:
    """Serve, run each tool, and print its last lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="of each tool (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=40, help="to print of each (default: %(default)s)")
    parser.add_argument("tools", nargs="+", metavar="NAME=FOLDER", help=f"NAME: {', '.join(COMMANDS)}")
    options = parser.parse_args()
    chosen = dict(tool.split("=", 1) for tool in options.tools)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serve = ["-m", "mambaslots", "serve", str(MODEL), "--threads", "1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, *serve, "--log-level", "warning"])
    try:
        _wait_for(f"{url}/health", server)
        codes = [_run(name, Path(folder), url, options) for name, folder in chosen.items()]
    finally:
        server.terminate()
        server.wait(60)
    return int(any(codes))


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server has ended")


def _run(name: str, folder: Path, url: str, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as results:
        values = {"url": url, "tokenizer": TOKENIZER, "seconds": options.seconds}
        program, *words = COMMANDS[name].format(**values).split()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": _hub_of(Path(results)),
            "COLUMNS": "180",
        }
        done = subprocess.run(
            [folder / program, *words], cwd=results, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=4 * options.seconds + 240, check=False,
        )  # fmt: skip
    print(f"== {name}: exit code {done.returncode}")
    print("\n".join(done.stdout.splitlines()[-options.lines :]), flush=True)
    return done.returncode


def _hub_of(folder: Path) -> str:
    """A cache of the hub with the model's tokenizer: not every tool takes a folder."""
    commit = "0" * 40
    model = folder / "hf" / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (model / "snapshots").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).symlink_to(MODEL)
    return str(folder / "hf")


if __name__ == "__main__":
    sys.exit(main())
