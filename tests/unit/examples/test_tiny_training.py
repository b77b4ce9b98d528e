"""Training computes what is served; its texts, its measures, and how it is resumed."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mambaslots as ms
import numpy as np
import pytest
import torch
import train_tiny
from oracle.recurrent_lm import RecurrentLM
from tiny_training.baselines import counted_bits, lzma_bits, primed_lzma_bits, zlib_bits
from tiny_training.bits_per_byte import WINDOW, bits_per_byte
from tiny_training.chunk_scans import scan_gated_delta_rule, scan_ssd
from tiny_training.parallel_forward import ParallelForward
from tiny_training.source_conversations import conversations
from tiny_training.source_files import SourceFiles
from tiny_training.special_tokens import ASSISTANT, DOCUMENT, END_OF_TURN, USER
from tiny_training.tiny_model import CONFIG, starting_model
from tiny_training.token_stream import TokenStream

LENGTHS = (1, 7, 16, 45)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (2, 2)])
def test_the_chunks_of_ssd_are_the_recurrence(length: int, heads: int, groups: int) -> None:
    x, dt = normal(2, length, heads, 5, seed=0), normal(2, length, heads, seed=1).exp()
    B, C = normal(2, length, groups, 3, seed=2), normal(2, length, groups, 3, seed=3)
    A, D = -normal(heads, seed=4).exp(), normal(heads, seed=5)
    y = scan_ssd(x, dt, A, B, C, D, chunk=16).numpy()
    for row in range(2):
        for head in range(heads):
            group, state = head * groups // heads, np.zeros((5, 3))
            for t in range(length):
                now, step = x[row, t, head].numpy(), float(dt[row, t, head])
                state = np.exp(step * float(A[head])) * state + step * np.outer(now, B[row, t, group])
                expected = state @ C[row, t, group].numpy() + float(D[head]) * now
                np.testing.assert_allclose(y[row, t, head], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (1, 3), (2, 2)])
def test_the_chunks_of_the_gated_delta_rule_are_the_recurrence(
    length: int, key_heads: int, value_heads: int
) -> None:
    q, k = normal(2, length, key_heads, 4, seed=0), normal(2, length, key_heads, 4, seed=1)
    v = normal(2, length, value_heads, 6, seed=2)
    g, beta = -normal(2, length, value_heads, seed=3).exp(), normal(2, length, value_heads, seed=4).sigmoid()
    o = scan_gated_delta_rule(q, k, v, g, beta, chunk=16).numpy()
    for row in range(2):
        for head in range(value_heads):
            key_head, state = head * key_heads // value_heads, np.zeros((4, 6))
            for t in range(length):
                query, key = q[row, t, key_head].numpy(), k[row, t, key_head].numpy()
                query = query / np.sqrt(query @ query + 1e-6) / 2.0
                key = key / np.sqrt(key @ key + 1e-6)
                state = np.exp(float(g[row, t, head])) * state
                error = v[row, t, head].numpy() - key @ state
                state = state + float(beta[row, t, head]) * np.outer(key, error)
                np.testing.assert_allclose(o[row, t, head], query @ state, rtol=0, atol=1e-10)


def test_keys_that_are_all_alike_do_not_blow_up_in_float32() -> None:
    """The worst case for the inverse within a chunk: a series of powers would cancel huge numbers."""
    k = torch.ones(1, 128, 1, 16)
    v, g, beta = normal(1, 128, 1, 8, seed=0).float(), torch.zeros(1, 128, 1), torch.full((1, 128, 1), 0.9)
    k.requires_grad_()
    o = scan_gated_delta_rule(k, k, v, g, beta, chunk=64)
    o.sum().backward()
    assert o.abs().max() < 10
    assert k.grad is not None
    assert k.grad.isfinite().all()


def test_the_gradient_of_the_gated_delta_rule() -> None:
    """Against torch's own gradient of the recurrence."""
    shapes = ((1, 9, 1, 3), (1, 9, 1, 3), (1, 9, 2, 2), (1, 9, 2), (1, 9, 2))
    q, k, v, g, beta = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    inputs = [q, k, v, -g.exp(), beta.sigmoid()]
    for tensor in inputs:
        tensor.requires_grad_()

    def recurrence(q, k, v, g, beta):
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        state, outputs = torch.zeros(2, 3, 2, dtype=torch.float64), []
        for t in range(9):
            state = g[0, t, :, None, None].exp() * state
            error = v[0, t] - torch.einsum("hkv,k->hv", state, k[0, t, 0])
            state = state + torch.einsum("k,hv->hkv", k[0, t, 0], beta[0, t, :, None] * error)
            outputs.append(torch.einsum("hkv,k->hv", state, q[0, t, 0]) * 3**-0.5)
        return torch.stack(outputs)[None]

    weight = normal(1, 9, 2, 2, seed=9)
    gradients = [
        torch.autograd.grad((o * weight).sum(), inputs)
        for o in (scan_gated_delta_rule(*inputs, chunk=4), recurrence(*inputs))
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("pattern", "weights"), [("M-G*C", "random"), (CONFIG.pattern, "random"), ("MG*-", "starting")]
)
def test_training_computes_what_is_served(pattern: str, weights: str) -> None:
    config = ms.models.HybridConfig.tiny(torch.float64, pattern=pattern, vocab_size=40)
    if weights == "random":
        model = ms.models.HybridLM(config, seed=2)
    else:
        model = starting_model(3, config).requires_grad_(False)
        model.lm_head.copy_(normal(*model.lm_head.shape, seed=1))
    tokens = torch.randint(40, (70,), generator=torch.Generator().manual_seed(0))
    logits = ParallelForward(config, chunk=16)(dict(model.named_parameters()), tokens[None])[0]
    torch.testing.assert_close(logits, RecurrentLM(model).logits(tokens.tolist()), rtol=0, atol=1e-9)
    settings = ms.InferenceConfig(
        block_size_tokens=16, max_requests=1, max_tokens_per_step=32, max_sequence_length=96, num_kv_blocks=8,
        num_mamba_slots=8,
    )  # fmt: skip
    ask = ms.SamplingParams(max_tokens=1, skip_prompt_log_probs=False)
    served = ms.DynamicInferenceEngine(model, settings).generate([tokens.tolist()], ask)[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(served.prompt_log_probs, dtype=torch.float64), expected, rtol=0, atol=1e-9
    )


SOURCE = b'''"""A module."""

import os


def first(path, size=3):
    """Return the beginning."""
    with open(path) as file:
        text = file.read()
    return text[:size]


class Names:
    @property
    def last(self):
        return self.names[-1]
'''


@pytest.fixture(scope="module")
def files() -> SourceFiles:
    texts = {f"package/module_{number}.py": SOURCE + b"# %d\n" % number for number in range(60)}
    return SourceFiles("3.12.1", texts | {"empty.py": b"", "broken.py": b"def ("})


class TestTexts:
    def test_a_pack_holds_the_same_files(self, files: SourceFiles, tmp_path: Path) -> None:
        files.pack(tmp_path / "pack.tar.xz")
        unpacked = SourceFiles.unpack(tmp_path / "pack.tar.xz")
        assert unpacked.texts == files.texts
        assert (unpacked.python, unpacked.digest) == (files.python, unpacked.digest)

    def test_every_change_of_a_file_changes_the_digest(self, files: SourceFiles) -> None:
        changed = {**files.texts, "empty.py": b"\n"}
        renamed = {name + "x": text for name, text in files.texts.items()}
        digests = {files.digest, *(replace(files, texts=texts).digest for texts in (changed, renamed))}
        assert len(digests) == 3

    def test_files_of_this_python_are_utf8_and_split_by_their_names(self) -> None:
        ours = SourceFiles.of_this_python()
        assert {"os.py", "json/decoder.py"} <= ours.texts.keys()
        assert not any("site-packages" in name for name in ours.texts)
        assert ours.held_out.keys().isdisjoint(ours.training)
        assert len(ours.held_out) + len(ours.training) == len(ours.texts)
        assert 0.02 < len(ours.held_out) / len(ours.texts) < 0.08

    def test_conversations_ask_for_parts_of_the_file_and_answer_with_them(self, files: SourceFiles) -> None:
        talks = list(conversations(files.texts, seed=0))
        assert talks == list(conversations(files.texts, seed=0))
        assert len(talks) == 60  # neither of the empty file nor of the broken one
        answers: Counter[bytes] = Counter()
        for tokens in talks:
            assert tokens[0] == DOCUMENT
            assert tokens.count(USER) == tokens.count(ASSISTANT) >= 1
            while ASSISTANT in tokens:
                tokens = tokens[tokens.index(ASSISTANT) + 1 :]
                answers[bytes(tokens[: tokens.index(END_OF_TURN)])] += 1
        assert answers[b"@property\ndef last(self):\n    return self.names[-1]\n"] > 5
        assert answers[b"Return the beginning."]
        rest = b"    with open(path) as file:\n        text = file.read()\n    return text[:size]\n"
        assert answers[rest] > 2

    def test_windows_come_from_both_kinds_of_document(self, files: SourceFiles) -> None:
        stream = TokenStream(files, torch.device("cpu"))
        windows = stream.windows(400, 64, np.random.default_rng(0))
        assert windows.shape == (400, 64)
        at_documents = (windows[:, 0] == DOCUMENT).double().mean()
        assert 0.4 < at_documents < 0.7
        of_conversations = ((windows == USER) | (windows == ASSISTANT)).any(1).double().mean()
        assert 0.15 < of_conversations < 0.45


class TestMeasures:
    TEXT = np.random.default_rng(0).integers(97, 101, 5000).astype(np.uint8).tobytes()  # two bits a byte

    def test_bits_of_a_model_that_knows_nothing_and_of_one_that_knows_the_text(self) -> None:
        texts = [self.TEXT, b"", b"x", self.TEXT[:WINDOW]]

        def uniform(tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 264)

        def cheater(tokens: torch.Tensor) -> torch.Tensor:
            known = torch.nn.functional.one_hot(tokens.roll(-1, dims=1), 264).double()
            return (0.5 * known + 0.5 / 264).log()

        device = torch.device("cpu")
        assert bits_per_byte(uniform, texts, device, 2) == pytest.approx(math.log2(264))
        expected = -math.log2(0.5 + 0.5 / 264)
        assert bits_per_byte(cheater, texts, device, 2) == pytest.approx(expected, abs=1e-4)

    def test_every_byte_counts_once(self) -> None:
        seen: Counter[int] = Counter()

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            seen.update(["calls"] * len(tokens))
            certain = torch.nn.functional.one_hot(tokens.roll(-1, dims=1), 264) * 1e3
            wrong = tokens.roll(-1, dims=1) == ord("!")
            return torch.where(wrong[..., None], torch.zeros(264), certain.float())

        text = b"a" * 1500 + b"!" + b"a" * 1499 + b"!" + b"a" * 3000
        bits = bits_per_byte(logits_of, [text], torch.device("cpu"))
        assert bits * len(text) == pytest.approx(2 * math.log2(264), rel=1e-5)

    def test_compressors_and_counts_come_near_the_entropy(self) -> None:
        held_out, training = [self.TEXT[:1000]], [self.TEXT]
        for bits in (zlib_bits([self.TEXT]), lzma_bits([self.TEXT])):
            assert 2.0 < bits < 3.0
        assert primed_lzma_bits(training, held_out) < 0.3
        independent = np.random.default_rng(1).integers(97, 101, 30000).astype(np.uint8).tobytes()
        assert 1.98 < counted_bits([independent], [self.TEXT], order=2) < 2.1

    def test_counts_are_witten_and_bell_s(self) -> None:
        # After "a" came "b" twice and "c" once: 3 counts and 2 different bytes. Alone: a, b and c of 6 bytes.
        alone = {"a": (3 + 3 / 256) / 9, "b": (2 + 3 / 256) / 9, "c": (1 + 3 / 256) / 9}
        start = (1 + 1 * alone["a"]) / 2  # a file began with "a"
        after_a = (2 + 2 * alone["b"]) / 5
        bits = counted_bits([b"abacab"], [b"ab"], order=1)
        assert bits == pytest.approx(-(math.log2(start) + math.log2(after_a)) / 2)


def test_a_small_training_is_saved_resumed_and_loaded(
    files: SourceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six steps at once, and three and three, come to the same weights."""
    files.pack(tmp_path / "pack.tar.xz")
    small = ms.models.HybridConfig.tiny(
        hidden_size=16, pattern="MG*-", vocab_size=264, mlp_hidden_size=16, mamba_num_heads=2
    )
    monkeypatch.setattr(train_tiny, "starting_model", lambda seed: starting_model(seed, small))
    monkeypatch.setattr(train_tiny, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: None)
    monkeypatch.setattr("tiny_training.bits_per_byte.WINDOW", 128)

    def train(output: str, *arguments: str) -> None:
        command = [
            "train_tiny.py",
            "--output",
            str(tmp_path / output),
            "--data",
            str(tmp_path / "pack.tar.xz"),
        ]
        command += ["--batch", "2", "--length", "48", "--learning-rate", "0.01", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        assert train_tiny.main() == 0

    train("whole", "--steps", "6")
    # The rate follows the budget: a run that stops in the middle must have the budget of the whole one.
    with monkeypatch.context() as patch:
        share = train_tiny.Trainer._share_done
        patch.setattr(
            train_tiny.Trainer, "_share_done", lambda self: 1.0 if self.progress.step == 3 else share(self)
        )
        patch.setattr(train_tiny, "plot", lambda figures, path: None)
        train("parts", "--steps", "6")
    train("parts", "--steps", "6", "--resume")
    whole, parts = (
        ms.models.HybridLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("whole", "parts")
    )
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(parts.get_parameter(name), weight, rtol=0, atol=1e-6)
    log = json.loads((tmp_path / "parts/log.json").read_text())
    assert log["steps"] == 6
    assert log["data"]["digest"] == files.digest == SourceFiles.unpack(tmp_path / "pack.tar.xz").digest
    assert 0 < log["held_out_bits_per_byte"] < 9
    assert ms.load(tmp_path / "parts").codec.encode_chat([{"role": "user", "content": "x"}])[0] == DOCUMENT
    assert (tmp_path / "parts/loss.png").is_file()
    assert "held-out files: " in capsys.readouterr().out
