"""What do cached states in bfloat16 or int8 cost in quality and time, and how many more fit?

quality  The trained model in models/tiny-code, float32, continues held-out source files behind a resume,
         beside the same model that has computed everything exactly. Both are given the file's bytes, so that
         each position is compared: the same most likely token, the KL divergence, the bits per byte.
         "resume at N": the state after N tokens is exact until it is stored, and resumed from once.
         "turns": a file is read in turns of 64 tokens; each resumes from the state that the turn before has
         stored, which itself began from a stored one. Rounding may add up there.
slots    Bytes of a state as it is live and as it is stored, at the shapes of real models: arithmetic.
times    Encoding and decoding n states of Nemotron-H-8B and Qwen3.5-4B, beside a copy of as many bytes and
         the memory's physical limit. On a CPU the shapes are tiny, and nothing is about a GPU.

    python benchmarks/encoded_states.py                              quality and slots, on the CPU
    python benchmarks/encoded_states.py --files 10                   as in the docs
    python benchmarks/encoded_states.py --device cuda --parts times

Exits 1 where int8 gives another most likely token in more than 1 % of the positions, or less than 3.5 times
the slots at Nemotron-H-8B.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import mambaslots as ms
import torch
from mambaslots.config import DURABLE_DTYPES
from mambaslots.state_spec import (
    SlotLayout,
    StateTensor,
    durable_tensors,
    gated_delta_net_states,
    mamba2_states,
)
from support.codec_times import LIMITS, measured
from support.command_line import add_count, add_device, check_device, make_parser
from tiny_training.source_files import SourceFiles
from tiny_training.special_tokens import DOCUMENT
from torch import Tensor

MODEL = Path(__file__).parents[1] / "models/tiny-code"
BLOCK, TURN = 32, 64
DEPTHS = (64, 512, 1536)
CONTINUED = 128
FIRST_TURN, LAST_TURN = 512, 1536
PARTS = ("quality", "slots", "times")
LEAST_SAME, LEAST_SLOTS = 0.99, 3.5


class Recorder:
    """The model; keeps the logits of every call until they are taken."""

    def __init__(self, model: ms.models.HybridLM) -> None:
        self._model = model
        self._logits: list[Tensor] = []

    def state_spec(self) -> ms.HybridStateSpec:
        return self._model.state_spec()

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        logits = self._model(inputs)
        self._logits.append(logits[: inputs.num_logits].float().cpu())
        return logits

    def take(self) -> Tensor:
        """[tokens, vocabulary] log-probs since the last call."""
        logits, self._logits = torch.cat(self._logits), []
        return logits.log_softmax(1)


@dataclass
class Comparison:
    """Sums over the positions behind resumes, of exact distributions and those after a rounded state."""

    stored_as: str
    case: str
    positions: int = 0
    same: int = 0
    kl_nats: float = 0.0
    largest_kl: float = 0.0
    bits_exact: float = 0.0
    bits_rounded: float = 0.0
    first: list[int] = field(default_factory=lambda: [0, 0])
    """Of the first 16 positions behind a resume: positions, and those with the same token."""

    def add(self, exact: Tensor, rounded: Tensor, tokens: Tensor) -> None:
        """`tokens` [n]: what follows each of the n positions of both [n, vocabulary] log-probs."""
        same = exact.argmax(1) == rounded.argmax(1)
        kl = (exact.exp() * (exact - rounded)).sum(1)
        self.positions += len(same)
        self.same += int(same.sum())
        self.kl_nats += float(kl.double().sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.bits_exact -= float(exact.gather(1, tokens[:, None]).double().sum()) / math.log(2)
        self.bits_rounded -= float(rounded.gather(1, tokens[:, None]).double().sum()) / math.log(2)
        self.first[0] += len(same[:16])
        self.first[1] += int(same[:16].sum())

    @property
    def share(self) -> float:
        """Of positions with the same most likely token."""
        return self.same / max(1, self.positions)

    def figures(self) -> dict[str, object]:
        number = max(1, self.positions)
        return asdict(self) | {
            "share_same": self.share,
            "share_same_first_16": self.first[1] / max(1, self.first[0]),
            "mean_kl_nats": self.kl_nats / number,
            "bits_per_byte_exact": self.bits_exact / number,
            "bits_per_byte_rounded": self.bits_rounded / number,
        }

    def row(self) -> str:
        found = self.figures()
        return (
            f"| {self.stored_as} | {self.case} | {self.positions} | {found['share_same']:.2%} | "
            f"{found['share_same_first_16']:.2%} | {found['mean_kl_nats']:.2e} | {self.largest_kl:.1e} | "
            f"{found['bits_per_byte_exact']:.4f} | {found['bits_per_byte_rounded']:.4f} |"
        )


HEADER = (
    "| stored as | case | positions | same token | same, first 16 | mean KL, nats | largest KL | "
    "bits per byte, exact | after a resume |\n|" + " --- |" * 9
)


def engine_of(model: Recorder, dtype: str | None, caching: bool) -> ms.DynamicInferenceEngine:
    longest = LAST_TURN + CONTINUED + 64
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK,
        max_requests=2,
        max_tokens_per_step=2048,
        max_sequence_length=longest,
        num_kv_blocks=4 * -(-longest // BLOCK),
        num_mamba_slots=64 if caching else None,
        enable_prefix_caching=caching,
        durable_state_dtype=dtype if caching else None,
    )
    return ms.DynamicInferenceEngine(model, config)


class Reader:
    """Scores files on engines that store states in one way each."""

    def __init__(self, device: str) -> None:
        model = Recorder(ms.models.HybridLM.from_pretrained(MODEL, device, torch.float32))
        self._model = model
        self._exact = engine_of(model, None, caching=False)
        kinds = {"as live": None} | {dtype: dtype for dtype in DURABLE_DTYPES}
        self._engines = {name: engine_of(model, dtype, caching=True) for name, dtype in kinds.items()}
        self.found: dict[tuple[str, str], Comparison] = {}

    def read(self, tokens: list[int]) -> None:
        """Add one file to the comparisons."""
        exact = self._scored(self._exact, tokens, 1)
        following = torch.tensor(tokens[1:])
        for name, engine in self._engines.items():
            for depth in DEPTHS:
                stop = depth + CONTINUED
                salt = f"resume at {depth}"
                self._scored(engine, tokens[: depth + 1], depth, salt, depth)
                rounded = self._scored(engine, tokens[: stop + 1], depth + 1, salt, resumed=depth)
                self._comparison(name, salt).add(exact[depth:stop], rounded, following[depth:stop])
            self._scored(engine, tokens[: FIRST_TURN + 1], FIRST_TURN, "turns", FIRST_TURN)
            for start in range(FIRST_TURN, LAST_TURN, TURN):
                stop = start + TURN
                rounded = self._scored(engine, tokens[: stop + 1], start + 1, "turns", stop, resumed=start)
                self._comparison(name, "turns").add(exact[start:stop], rounded, following[start:stop])
            engine.reset_prefix_cache()

    def _comparison(self, stored_as: str, case: str) -> Comparison:
        return self.found.setdefault((stored_as, case), Comparison(stored_as, case))

    def _scored(
        self,
        engine: ms.DynamicInferenceEngine,
        tokens: list[int],
        start: int,
        salt: str | None = None,
        mark: int | None = None,
        resumed: int = 0,
    ) -> Tensor:
        """Log-probs [len(tokens) - start, vocabulary] of tokens `start` on; the state at `mark` is stored."""
        plan = ms.CheckpointPlan(marks=() if mark is None else (mark,))
        (result,) = engine.score([tokens], start, cache_salt=salt, checkpoint_plan=plan)
        if result.num_resumed_tokens != resumed:
            sys.exit(f"resumed at {result.num_resumed_tokens}, not at {resumed}")
        return self._model.take()


def quality(device: str, num_files: int) -> list[dict[str, object]]:
    files = SourceFiles.of_this_python()
    longest = max(DEPTHS[-1] + CONTINUED, LAST_TURN) + 1
    texts = [text for text in files.held_out.values() if len(text) >= longest][:num_files]
    print(
        f"Python {files.python}: {len(texts)} held-out files, the first {longest - 1:,} bytes of each",
        flush=True,
    )
    reader = Reader(device)
    with torch.inference_mode():
        for number, text in enumerate(texts, 1):
            reader.read([DOCUMENT, *text[: longest - 1]])
            print(f"file {number} is read", flush=True)
    comparisons = list(reader.found.values())
    print(f"\n{HEADER}")
    for one in comparisons:
        print(one.row())
    print()
    return [one.figures() for one in comparisons]


def shapes() -> dict[str, tuple[StateTensor, ...]]:
    """States of real models: windows in bfloat16, matrices in float32."""
    bf16, fp32 = torch.bfloat16, torch.float32
    mamba = {
        "Nemotron-H-8B": (24, 128, 64, 8, 128),
        "Nemotron-H-47B": (45, 256, 64, 8, 256),
        "Nemotron-3-Nano-30B-A3B": (23, 64, 64, 8, 128),
        "Bamba-9B": (29, 128, 64, 1, 128),
        "Falcon-H1-34B": (72, 32, 128, 2, 256),
    }
    delta = {"Qwen3.5-4B": (24, 16, 128, 32, 128), "Qwen3-Next-80B-A3B": (36, 16, 128, 32, 128)}
    found = {name: mamba2_states(*sizes, 4, bf16, fp32, 256) for name, sizes in mamba.items()}
    return found | {name: gated_delta_net_states(*sizes, 4, bf16, fp32) for name, sizes in delta.items()}


def slots() -> list[dict[str, object]]:
    print(
        "| model | MiB live | bfloat16 | int8 | slots, bfloat16 | slots, int8 | int8 of bfloat16 matrices |"
    )
    print("|" + " --- |" * 7)
    rows = []
    for name, states in shapes().items():
        live = SlotLayout.of(states).slot_bytes
        stored = {dtype: SlotLayout.of(durable_tensors(states, dtype)).slot_bytes for dtype in DURABLE_DTYPES}
        short = [replace(one, dtype=torch.bfloat16) for one in states]
        gain = SlotLayout.of(short).slot_bytes / SlotLayout.of(durable_tensors(short, "int8")).slot_bytes
        row = {"model": name, "live_bytes": live, "stored_bytes": stored}
        rows.append(row | {"slots": {dtype: live / size for dtype, size in stored.items()}})
        mib, times = (
            [live / 2**20] + [size / 2**20 for size in stored.values()],
            [live / size for size in stored.values()],
        )
        cells = [f"{size:.1f}" for size in mib] + [f"x {ratio:.2f}" for ratio in (*times, gain)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    return rows


def judged(figures: dict[str, list[dict[str, object]]]) -> list[str]:
    """What int8 misses of what is required."""
    missed = []
    for row in figures.get("quality", []):
        if row["stored_as"] == "int8" and row["share_same"] < LEAST_SAME:  # type: ignore[operator]
            missed.append(f"int8, {row['case']}: {row['share_same']:.2%} the same token")
    for row in figures.get("slots", []):
        if row["model"] == "Nemotron-H-8B" and row["slots"]["int8"] < LEAST_SLOTS:  # type: ignore[index]
            missed.append(f"int8 at Nemotron-H-8B: x {row['slots']['int8']:.2f} slots")  # type: ignore[index]
    return missed


def main() -> int:
    parser = make_parser(__doc__)
    add_device(parser, "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="default: quality slots")
    add_count(parser, "--files", 5, "held-out files")
    add_count(parser, "--calls", 20, "calls that a time is the median of")
    args = parser.parse_args()
    check_device(parser, args.device)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    figures: dict[str, list[dict[str, object]]] = {}
    if "quality" in args.parts:
        figures["quality"] = quality(args.device, args.files)
    if "slots" in args.parts:
        figures["slots"] = slots()
    if "times" in args.parts:
        figures["times"] = measured(shapes(), args.device, args.calls)
    missed = judged(figures)
    print("\n".join(f"NOT MET: {what}" for what in missed) or "met: all that is required")
    if args.json:
        args.json.write_text(json.dumps(figures | {"limits": LIMITS, "missed": missed}, indent=1) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
