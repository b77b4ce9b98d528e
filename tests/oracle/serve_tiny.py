"""A process that serves a tiny model with `serve`; its argument is the settings as JSON."""

import json
import logging
import sys

import mambaslots as ms
import torch
from mambaslots.serve import ServerSettings, serve
from oracle.served import small_config, tiny_loaded

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    loaded = tiny_loaded()
    engine = ms.DynamicInferenceEngine(loaded.model, small_config(max_requests=2))
    sys.exit(serve(engine, loaded, ServerSettings(model_name="tiny", **json.loads(sys.argv[1]))))
