"""Stock megatron-core answers one prompt twice differently; with mambaslots it answers twice alike.

megatron-core's DynamicInferenceEngine serves a small hybrid model with random weights, with prefix caching.
The prompt has 97 tokens: three blocks of 32, and one token more. The engine serves it twice with
megatron-core's own cache, and twice with mambaslots in its place. Each line is one request: prompt tokens,
prompt tokens that were resumed, answer. The exit code is 1 if the answers with mambaslots differ.

    python examples/same_prompt_twice.py

Without a GPU `mcore_rig` lets megatron-core run on the CPU, in about 20 seconds.
"""

import argparse
import logging
import sys

import mambaslots.mcore
import mcore_rig

Answers = list[list[int]]


def serve_twice(name: str, prompt: list[int], num_tokens: int, seed: int) -> Answers:
    """Serve `prompt` twice in a row with a new engine, print both requests and return both answers."""
    model = mcore_rig.hybrid_model(seed=seed)
    engine = mcore_rig.make_engine(model, num_mamba_slots=16)
    print(f"== {name}")
    answers = []
    for _ in range(2):
        (served,) = mcore_rig.serve(engine, [prompt], num_tokens)
        print(served.num_prompt_tokens, served.num_resumed_tokens, served.tokens, flush=True)
        answers.append(served.tokens)
    return answers


def parse_arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: an integer >= 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=positive, default=97, metavar="N", help="prompt tokens (97)")
    parser.add_argument("--tokens", type=positive, default=4, metavar="N", help="of each answer (4)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (1)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    logging.disable(logging.WARNING)  # of megatron-core
    prompt = [token % mcore_rig.VOCABULARY for token in range(args.length)]
    with mcore_rig.on_this_machine():
        serve_twice("megatron-core", prompt, args.tokens, args.seed)
        with mambaslots.mcore.installed():
            first, second = serve_twice("megatron-core with mambaslots", prompt, args.tokens, args.seed)
    return 0 if first == second else 1


if __name__ == "__main__":
    sys.exit(main())
