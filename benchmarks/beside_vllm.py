"""vLLM and mambaslots on one GPU: the same requests, the same clock, one process after the other.

    python benchmarks/beside_vllm.py --json out.json                 (one GPU of 80 GB; half an hour)
    python benchmarks/beside_vllm.py --vllm /opt/vllm/bin/python     (vLLM 0.26 in an environment of its own)
    python benchmarks/beside_vllm.py --tiny --models Qwen3.5-4B      (a CPU, our side: does it run?)

Weights are random, of the same distribution, and decoding is greedy. vLLM runs in one process with its
defaults: compiled, CUDA graphs, async scheduling, prefix caching. The model in the shape of Qwen3.6-27B fills
the card, and is measured with 16 clients alone. `--logs FOLDER` keeps what both sides print; a second call
with the same folder adds to its table. The exit status is 1 where a part failed.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from support.command_line import make_parser

HERE = Path(__file__).parent / "vllm_peer"
sys.path.insert(0, str(HERE))
CAPTURED = ("1", "2", "4", "8", "16", "32", "64", "128", "256")


def commands(args: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """The name of each log, and what writes it."""
    parts = ["--model", model, *(["--parts", *args.parts] if args.parts else [])]
    ours = [sys.executable, str(HERE / "ours_side.py"), *parts]
    if args.tiny:
        return {f"{model}.ours": [*ours, "--tiny", "--device", "cpu"]}
    found = {f"{model}.ours": ours}
    if model != "Qwen3.6-27B":  # the inputs that are kept do not fit beside its weights
        found[f"{model}.invariant"] = [*ours, "--invariant"]
    if args.vllm:
        memory = "0.95" if model == "Qwen3.6-27B" else "0.8"
        peer = [*shlex.split(args.vllm), str(HERE / "vllm_side.py"), *parts, "--memory", memory]
        found[f"{model}.vllm"] = [*peer, "--capture", *CAPTURED]
    return found


def main() -> int:
    import common
    import figures

    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=common.VOCABULARY, default=list(common.VOCABULARY))
    parser.add_argument("--parts", nargs="+", choices=common.PARTS, help="which (default: the model's)")
    parser.add_argument("--logs", type=Path, help="folder of the sides' output (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU, our side alone")
    here = sys.executable if importlib.util.find_spec("vllm") else None
    parser.add_argument("--vllm", default=here, help="what starts Python with vLLM (default: this one)")
    parser.add_argument("--commit", help="of mambaslots, for the JSON")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU")
        return 0
    if not args.vllm:
        print("vLLM is not installed here: its side is left out")
    folder = args.logs or Path(tempfile.mkdtemp(prefix="beside-vllm-"))
    folder.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    failed: list[str] = []
    for model in args.models:
        for name, command in commands(args, model).items():
            log = folder / f"{name}.log"
            print(log, flush=True)
            with log.open("w") as out:
                if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode:
                    failed.append(name)
            result = figures.document(sorted(folder.glob("*.log")), device, args.commit)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    for model, sides in result["models"].items():
        failed += [f"{model}, {side}: {part}" for side, of in sides.items() for part in of.get("failed", ())]
    figures.print_table(result["models"])
    figures.print_verdict(result["models"])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
