"""A user's script, which knows megatron-core and nothing of mambaslots; test_runner.py runs it both ways.

Prints, as JSON, the answers to one prompt of 2 blocks and 1 token asked twice.
"""

import json
import sys
from random import Random

import mcore_rig
import torch


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    prompt = Random(4).choices(range(256), k=2 * mcore_rig.BLOCK + 1)
    with mcore_rig.on_this_machine():
        engine = mcore_rig.make_engine(mcore_rig.hybrid_model(), prefix_caching="--no-cache" not in arguments)
        served = mcore_rig.serve(engine, [prompt] * 2)
    report = {
        "answers": [one.tokens for one in served],
        "resumed": [one.num_resumed_tokens for one in served],
        "arguments": arguments,
        "script": __file__,
        "mambaslots": "mambaslots" in sys.modules,
    }
    print(json.dumps(report))
    return 3 if "--fail" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
