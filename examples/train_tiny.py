"""Train the small model of `make demo` on the source of Python's standard library, byte by byte.

    python examples/train_tiny.py --pack stdlib.tar.xz                # the texts in one file, for elsewhere
    python examples/train_tiny.py --output out/tiny --minutes 100     # on two cores
    python examples/train_tiny.py --output out/tiny --minutes 7 --device cuda --data stdlib.tar.xz

The output folder gets the model as `ms.load` reads it, log.json with all figures, loss.png, and a checkpoint
that `--resume` goes on from. The learning rate follows the budget, minutes or steps: a cosine to zero.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mambaslots as ms
import numpy as np
import torch
import torch.nn.functional as F
from arguments import add_count, add_device, check_device, new_file
from tiny_training.bits_per_byte import bits_per_byte
from tiny_training.parallel_forward import ParallelForward
from tiny_training.source_files import SourceFiles
from tiny_training.special_tokens import write_text_files
from tiny_training.tiny_model import starting_model
from tiny_training.token_stream import TokenStream
from torch import Tensor

WARM_UP_STEPS = 100
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
MAX_SKIPPED = 20
LN2 = math.log(2)


@dataclass
class Progress:
    """What a checkpoint holds beside weights and moments; `history` has (step, seconds, bits per token)."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    skipped: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)


class Trainer:
    """The weights, their optimizer, and the loop."""

    def __init__(self, args: argparse.Namespace, files: SourceFiles) -> None:
        self.args, self.files, self.device = args, files, torch.device(args.device)
        self.model = starting_model(args.seed).to(self.device)
        self.weights = dict(self.model.named_parameters())
        matrices = [w for name, w in self.weights.items() if w.dim() == 2 and "conv" not in name]
        others = [w for w in self.weights.values() if not any(w is matrix for matrix in matrices)]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            lr=args.learning_rate,
            betas=BETAS,
            fused=True,
        )
        on_gpu = self.device.type == "cuda"
        self.forward = ParallelForward(self.model.config, torch.bfloat16 if on_gpu else None)
        self.loss = torch.compile(self._loss) if args.compile else self._loss
        self.random = np.random.default_rng(args.seed)
        self.progress = Progress()
        self.checkpoint = args.checkpoint or args.output / "checkpoint.pt"
        if args.resume:
            self._load()

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self.forward(self.weights, tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train(self) -> None:
        progress = self.progress
        texts = TokenStream(self.files, self.device)
        print(
            f"{sum(w.numel() for w in self.weights.values()):,} weights; {len(self.files.training):,} files, "
            f"{texts.num_plain:,} tokens of files and {texts.num_conversation_tokens:,} of conversations",
            flush=True,
        )
        started, before = time.perf_counter(), progress.seconds
        saved = shown = started
        while (done := self._share_done()) < 1:
            loss = self._step(texts, done)
            now = time.perf_counter()
            progress.seconds = before + now - started
            if progress.step % 20 == 1:
                progress.history.append((progress.step, progress.seconds, float(loss) / LN2))
            if now - shown > (1 if sys.stdout.isatty() else 10):
                shown = now
                self._show(done)
            if now - saved > 60:
                self._sample_held_out()
                self._save()
                saved = now
        self._show(1.0)
        print(flush=True)
        self._sample_held_out()
        self._save()

    def _share_done(self) -> float:
        """Of the budget, 0 to 1."""
        if self.args.steps:
            return float(self.progress.step / self.args.steps)
        return float(self.progress.seconds / (60 * self.args.minutes))

    def _step(self, texts: TokenStream, done: float) -> Tensor:
        args, progress = self.args, self.progress
        rate = args.learning_rate * min(1.0, (progress.step + 1) / WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done))
        tokens = texts.windows(args.batch, args.length + 1, self.random)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM)
        if bool(norm.isfinite()):
            self.optimizer.step()
            progress.skipped = 0
        else:
            progress.skipped += 1
            print(f"\nstep {progress.step} is left out: its gradient is not finite", flush=True)
            if progress.skipped == MAX_SKIPPED:
                raise RuntimeError(f"{MAX_SKIPPED} gradients in a row are not finite")
        progress.step += 1
        progress.tokens += tokens.numel() - len(tokens)
        return loss.detach()

    def _show(self, done: float) -> None:
        progress = self.progress
        recent = [bits for _, _, bits in progress.history[-10:]]
        bar = ("#" * int(30 * done)).ljust(30, ".")
        line = (
            f"[{bar}] step {progress.step:,}, {progress.seconds:.0f} s, "
            f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s, "
            f"{sum(recent) / max(1, len(recent)):.3f} bits a token"
        )
        print(
            f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True
        )

    def measure(self, texts: list[bytes], rounded: bool = False) -> float:
        """Bits per byte of these files; `rounded`: with the weights as they were saved."""
        model = self.model
        if rounded:
            model = ms.models.HybridLM.from_pretrained(self.args.output, self.device, torch.float32)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        batch = 16 if self.device.type == "cuda" else 2
        return bits_per_byte(lambda tokens: self.forward(weights, tokens), texts, self.device, batch)

    def _sample_held_out(self) -> None:
        beginnings = [text[:4096] for text in self.files.held_out.values()][:16]
        bits = self.measure(beginnings)
        self.progress.held_out.append((self.progress.step, self.progress.seconds, bits))

    def _save(self) -> None:
        """The checkpoint and the model, each as a whole or not at all."""
        state = {
            "weights": self.weights,
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.bit_generator.state,
            "progress": vars(self.progress),
            "digest": self.files.digest,
        }
        beside = self.checkpoint.with_suffix(".part")
        torch.save(state, beside)
        os.replace(beside, self.checkpoint)
        self.model.save_pretrained(self.args.output, torch.float16)
        write_text_files(self.args.output)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["digest"] != self.files.digest:
            raise ValueError(
                f"--resume: the files' digest is {self.files.digest}; the checkpoint's is {state['digest']}"
            )
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.bit_generator.state = state["random"]
        self.progress = Progress(**state["progress"])

    def figures(self) -> dict[str, Any]:
        """What log.json says."""
        args, progress, files = self.args, self.progress, self.files
        on_gpu = self.device.type == "cuda"
        return {
            "command": " ".join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "data": {
                "python": files.python,
                "digest": files.digest,
                "files": len(files.texts),
                "bytes": files.num_bytes,
                "held_out_files": len(files.held_out),
                "held_out_bytes": sum(map(len, files.held_out.values())),
            },
            "weights": sum(weight.numel() for weight in self.weights.values()),
            "batch": args.batch,
            "length": args.length,
            "learning_rate": args.learning_rate,
            "seed": args.seed,
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "bits_per_token": progress.history,
            "held_out_sample_bits_per_byte": progress.held_out,
        }


def plot(figures: dict[str, Any], path: Path) -> None:
    """The loss over the tokens seen; without matplotlib nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    per_step = figures["batch"] * figures["length"] / 1e6
    losses = np.array(figures["bits_per_token"]).reshape(-1, 3)
    width = max(1, len(losses) // 200)
    smooth = np.convolve(losses[:, 2], np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(losses[width - 1 :, 0] * per_step, smooth, label="training, files and conversations")
    held_out = np.array(figures["held_out_sample_bits_per_byte"])
    axes.plot(held_out[:, 0] * per_step, held_out[:, 2], "o-", label="held-out files, their beginnings")
    if "held_out_bits_per_byte" in figures:
        final = figures["held_out_bits_per_byte"]
        axes.axhline(final, color="grey", lw=0.8, label=f"held-out files, all bytes: {final:.3f}")
    axes.set(xlabel="million tokens", ylabel="bits per byte", ylim=(0.8, 4.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the model goes")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a pack (default: this Python's files)")
    parser.add_argument("--pack", type=new_file, metavar="FILE", help="write the pack, and end")
    parser.add_argument("--minutes", type=float, default=100.0, help="budget (default: %(default)s)")
    add_count(parser, "--steps", 0, "budget in steps instead; 0: in minutes", at_least=0)
    add_count(parser, "--batch", 0, "sequences of a step; 0: 16 on a GPU, 4 on a CPU", at_least=0)
    add_count(parser, "--length", 0, "tokens of a sequence; 0: 2048 on a GPU, 1024 on a CPU", at_least=0)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default: %(default)s)")
    add_count(parser, "--seed", 0, "seed of the weights and the batches", at_least=0)
    add_device(parser, "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--checkpoint", type=new_file, metavar="FILE", help="(default: in the output folder)")
    args = parser.parse_args()
    if not args.pack and not args.output:
        parser.error("one of the arguments --output --pack is required")
    check_device(parser, args.device)
    args.batch = args.batch or (16 if args.device == "cuda" else 4)
    args.length = args.length or (2048 if args.device == "cuda" else 1024)
    return args


def main() -> int:
    args = parse_arguments()
    files = SourceFiles.unpack(args.data) if args.data else SourceFiles.of_this_python()
    print(f"Python {files.python}: {len(files.texts):,} files, {files.num_bytes:,} bytes, {files.digest}")
    if args.pack:
        files.pack(args.pack)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)  # decays reach such numbers, and a CPU computes them slowly
    trainer = Trainer(args, files)
    trainer.train()
    figures = trainer.figures()
    log = args.output / "log.json"
    log.write_text(json.dumps(figures) + "\n")
    held_out = list(files.held_out.values())
    figures["held_out_bits_per_byte"] = trainer.measure(held_out, rounded=True)
    print(f"held-out files: {figures['held_out_bits_per_byte']:.4f} bits per byte")
    log.write_text(json.dumps(figures) + "\n")
    plot(figures, args.output / "loss.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
