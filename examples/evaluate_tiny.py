"""Measure what the small model has learned: bits per byte of held-out files, beside compressors and counts.

    python examples/evaluate_tiny.py models/tiny-code

prints a table in Markdown. The files are those that `train_tiny.py` did not train on: of this Python, or of
the pack that `--data` names. A model is measured fairly by the files of the version of Python that it was
trained on, which its training.json names.
"""

import json
import sys
import time
from pathlib import Path

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser
from tiny_training.baselines import counted_bits, lzma_bits, primed_lzma_bits, zlib_bits
from tiny_training.bits_per_byte import bits_per_byte
from tiny_training.parallel_forward import ParallelForward
from tiny_training.source_files import SourceFiles


def first_bytes(texts: list[bytes], count: int) -> list[bytes]:
    """The beginning of every file, `count` bytes in all; all bytes for 0."""
    share = -(-count // len(texts))
    return [text[:share] for text in texts] if count else texts


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="a folder of train_tiny.py")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a pack (default: this Python's files)")
    add_count(
        parser, "--model-bytes", 100_000, "bytes that the model reads, of all files; 0: all", at_least=0
    )
    add_device(parser, "cpu")
    args = parser.parse_args()
    check_device(parser, args.device)
    torch.set_flush_denormal(True)
    files = SourceFiles.unpack(args.data) if args.data else SourceFiles.of_this_python()
    training, held_out = list(files.training.values()), list(files.held_out.values())
    model = ms.models.HybridLM.from_pretrained(args.model, args.device, torch.float32)
    weights, forward = dict(model.named_parameters()), ParallelForward(model.config)
    sample = first_bytes(held_out, args.model_bytes)
    device = torch.device(args.device)

    def model_bits() -> float:
        return bits_per_byte(lambda tokens: forward(weights, tokens), sample, device, batch=2)

    measures = {
        f"the model, {sum(map(len, sample)):,} bytes": model_bits,
        "zlib, level 9": lambda: zlib_bits(held_out),
        "lzma, preset 9, extreme": lambda: lzma_bits(held_out),
        "lzma, primed with the training files": lambda: primed_lzma_bits(training, held_out),
        "order-5 counts of the training files": lambda: counted_bits(training, held_out),
    }
    print(f"Python {files.python}, digest {files.digest}: {len(held_out)} files are held out,")
    print(f"{sum(map(len, held_out)):,} bytes, of {len(files.texts):,} files, {files.num_bytes:,} bytes.\n")
    print("| | bits per byte | seconds |\n| --- | --- | --- |")
    results = {}
    for name, measure in measures.items():
        started = time.perf_counter()
        results[name] = measure()
        print(f"| {name} | {results[name]:.3f} | {time.perf_counter() - started:.0f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
