"""A process that serves a tiny model with `serve`; its argument is the settings as JSON.

With "hangs" its first step does not end; "max_requests" run at once, 2 without it;
it may open "max_files", if it raises its limit, which is half of that. With "pauses_until", a path, it makes
no step after a request's first 20 tokens until there is a file.
"""

import json
import logging
import resource
import sys
from pathlib import Path
from time import sleep
from typing import Any

import mambaslots as ms
import torch
from mambaslots.serve import ServerSettings, serve
from oracle.served import small_config, tiny_loaded


def pause(engine: ms.DynamicInferenceEngine, path: Path) -> None:
    """Let steps after a request's first 20 tokens, with which its stream begins, wait for a file."""
    step = engine.step

    def step_later(**how: Any) -> ms.StepReport:
        while any(one.num_new > 20 for one in engine.core.requests.values()) and not path.exists():
            sleep(0.005)
        return step(**how)

    engine.step = step_later  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if max_files := settings.pop("max_files", 0):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files // 2, max_files))
    logging.basicConfig(level=logging.INFO)
    loaded = tiny_loaded()
    engine = ms.DynamicInferenceEngine(
        loaded.model, small_config(max_requests=settings.pop("max_requests", 2))
    )
    if settings.pop("hangs", False):
        engine.step = lambda **_: sleep(1000)  # type: ignore[method-assign,assignment,return-value]
    if path := settings.pop("pauses_until", None):
        pause(engine, Path(path))
    sys.exit(serve(engine, loaded, ServerSettings(model_name="tiny", **settings)))
