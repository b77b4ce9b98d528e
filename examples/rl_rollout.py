"""Roll out groups of answers, score them, train on them: rollout log-probs are the scored ones.

Each iteration samples 16 answers to each prompt at temperature 1, all at once: a prompt is computed once, and
the other requests of its group wait for the state that the first one stores. `engine.score` then gives the
log-probs of the same tokens by prefill, from the cached prompts. A step of policy gradient moves all weights,
and `engine.set_weights_version` forgets the states of the old ones. The reward is the share of lower-case
letters in an answer.

On a GPU the model is one of bfloat16, the engine is built with `batch_invariant=True`, and the log-probs of
rollout and score must have equal bits. On a CPU (float64) they must be equal up to 1e-9.

    python examples/rl_rollout.py --device cuda --iterations 8 --json out.json

The last line says how far they differ; the exit code is 1 where they differ by more than is promised.
"""

import json
import sys
from dataclasses import asdict, dataclass

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser
from tiny_training.parallel_forward import ParallelForward

GROUP = 16
TOLERANCE = {"cpu": 1e-9, "cuda": 0.0}
RATE = {"cpu": 1.0, "cuda": 4.0}
"""How far a step moves all weights together (2-norm); the GPU's model has many more."""
PROMPTS = [
    bytes(text, "ascii")
    for text in (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be "
        "in want of a wife. However little known the feelings or views of such a man may be on his first "
        "entering a neighbourhood, ",
        "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my "
        "purse, and nothing particular to interest me on shore, I thought I would sail about a little and "
        "see the watery part of the world. It is a way I have ",
    )
]


@dataclass
class Iteration:
    """What one iteration did.

    Attributes:
        num_prompt_tokens, num_computed_tokens: of all prompts, and those of them that were computed.
        num_positions: tokens of all answers.
        largest_difference: between a token's log-prob as it was sampled and as it was scored.
        num_unequal: tokens whose two log-probs differ at all.
        num_score_resumed_tokens: tokens that scoring resumed from the cache.
        trainer_difference: the largest one between scored log-probs and those of the trainer's own forward.
        reward: the mean over all answers.
    """

    num_prompt_tokens: int
    num_computed_tokens: int
    num_positions: int
    largest_difference: float
    num_unequal: int
    num_score_resumed_tokens: int
    trainer_difference: float
    reward: float


def make_engine(device: str) -> tuple[ms.DynamicInferenceEngine, ms.models.HybridLM]:
    if device == "cuda":
        shape = ms.models.HybridConfig.tiny(
            torch.bfloat16, hidden_size=1024, mamba_num_heads=32, mamba_head_dim=64, mamba_num_groups=8,
            mamba_state_dim=128, ssd_chunk_size=64, num_attention_heads=8, num_kv_heads=2, head_dim=128,
            mlp_hidden_size=2048,
        )  # fmt: skip
    else:
        shape = ms.models.HybridConfig.tiny(torch.float64)
    model = ms.models.HybridLM(shape, seed=0).to(device)
    exact = {"batch_invariant": True} if device == "cuda" else {}
    config = ms.InferenceConfig(
        block_size_tokens=64 if device == "cuda" else 32,
        max_requests=GROUP * len(PROMPTS),
        max_tokens_per_step=1024,
        max_sequence_length=1024,
        num_kv_blocks=1024,
        num_mamba_slots=256,
        **exact,
    )
    return ms.DynamicInferenceEngine(model, config), model


def roll_out(engine: ms.DynamicInferenceEngine, tokens: int, seed: int) -> list[ms.RequestResult]:
    """`GROUP` answers to each prompt; answers to one prompt follow one another."""
    prompts = [list(prompt) for prompt in PROMPTS for _ in range(GROUP)]
    params = [
        ms.SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed + number, return_log_probs=True)
        for number in range(len(prompts))
    ]
    return engine.generate(prompts, params)


def reward_of(answer: list[int]) -> float:
    return sum(97 <= token <= 122 for token in answer) / len(answer)


def train(
    model: ms.models.HybridLM, answers: list[list[int]], rewards: torch.Tensor, rate: float
) -> list[list[float]]:
    """A step of policy gradient on all weights; returns the log-probs of the trainer's own forward."""
    wide = torch.promote_types(model.config.dtype, torch.float32)
    weights = {name: weight.detach().to(wide).requires_grad_() for name, weight in model.named_parameters()}
    forward = ParallelForward(model.config)
    loss, own = torch.zeros((), dtype=wide, device=model.lm_head.device), []
    for number, prompt in enumerate(PROMPTS):
        group = slice(number * GROUP, (number + 1) * GROUP)
        tokens = torch.tensor([[*prompt, *answer] for answer in answers[group]], device=loss.device)
        chosen = tokens[:, len(prompt) :, None]
        logits = forward(weights, tokens[:, :-1])[:, len(prompt) - 1 :]
        log_probs = logits.log_softmax(-1).gather(2, chosen)[..., 0]
        advantages = (rewards[group] - rewards[group].mean()).to(log_probs)
        loss = loss - (advantages[:, None] * log_probs).mean()
        own += log_probs.detach().tolist()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    with torch.no_grad():
        for name, gradient in zip(weights, gradients, strict=True):
            weight = model.get_parameter(name)
            weight.copy_(weights[name] - rate * gradient / norm)
    return own


def largest_difference(one: list[list[float]], other: list[list[float]]) -> float:
    return max(
        abs(a - b) for row, same in zip(one, other, strict=True) for a, b in zip(row, same, strict=True)
    )


def iterate(
    engine: ms.DynamicInferenceEngine, model: ms.models.HybridLM, number: int, tokens: int, rate: float
) -> Iteration:
    results = roll_out(engine, tokens, seed=number * 1_000_000)
    answers = [result.tokens for result in results]
    rolled_out = [result.log_probs or [] for result in results]
    prompts = [list(prompt) for prompt in PROMPTS for _ in range(GROUP)]
    scores = engine.score(
        [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        [len(prompt) for prompt in prompts],
    )
    scored = [score.log_probs for score in scores]
    rewards = torch.tensor([reward_of(answer) for answer in answers])
    trained = train(model, answers, rewards, rate)
    engine.set_weights_version(number + 1)
    return Iteration(
        num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
        num_computed_tokens=sum(sum(result.computed_by_reason.values()) for result in results),
        num_positions=sum(map(len, answers)),
        largest_difference=largest_difference(rolled_out, scored),
        num_unequal=sum(
            a != b
            for one, other in zip(rolled_out, scored, strict=True)
            for a, b in zip(one, other, strict=True)
        ),
        num_score_resumed_tokens=sum(score.num_resumed_tokens for score in scores),
        trainer_difference=largest_difference(scored, trained),
        reward=float(rewards.mean()),
    )


def print_table(iterations: list[Iteration]) -> None:
    rows: list[tuple[str, list[str]]] = [
        ("weights version", [str(number) for number in range(len(iterations))]),
        ("prompt tokens", [f"{one.num_prompt_tokens:,}" for one in iterations]),
        ("  computed", [f"{one.num_computed_tokens:,}" for one in iterations]),
        ("resumed by score", [f"{one.num_score_resumed_tokens:,}" for one in iterations]),
        ("answer tokens", [f"{one.num_positions:,}" for one in iterations]),
        ("  log-probs with other bits", [f"{one.num_unequal:,}" for one in iterations]),
        ("  largest difference", [f"{one.largest_difference:.1e}" for one in iterations]),
        ("  to the trainer's forward", [f"{one.trainer_difference:.1e}" for one in iterations]),
        ("mean reward", [f"{one.reward:.3f}" for one in iterations]),
    ]
    for name, cells in rows:
        print(f"{name:<28}" + "".join(f"{cell:>10}" for cell in cells))
    print()


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--iterations", 4, "rollouts, with an update of the weights after each")
    add_count(parser, "--tokens", 32, "tokens of each answer")
    add_device(parser, "cpu")
    args = parser.parse_args()
    check_device(parser, args.device)
    torch.set_num_threads(1)  # these shapes are small
    engine, model = make_engine(args.device)
    rate = RATE[args.device]
    iterations = [iterate(engine, model, number, args.tokens, rate) for number in range(args.iterations)]
    engine.check_integrity()
    print_table(iterations)
    positions = sum(one.num_positions for one in iterations)
    largest, promised = max(one.largest_difference for one in iterations), TOLERANCE[args.device]
    if args.json:
        figures = {
            "device": args.device,
            "group": GROUP,
            "num_positions": positions,
            "largest_difference": largest,
            "promised": promised,
            "iterations": [asdict(one) for one in iterations],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    promise = "equal bits" if args.device == "cuda" else f"at most {promised:.0e}; equal bits on a GPU only"
    print(
        f"rollout and score: {positions:,} log-probs, largest difference {largest:.1e} (promised: {promise})"
    )
    return 0 if largest <= promised else 1


if __name__ == "__main__":
    sys.exit(main())
