"""A script of megatron-core with the drop-in installed, and what the drop-in says about it on stderr."""

import argparse
import json
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from .built_contexts import SETTINGS, SHORT_LIVED, BuiltContext, built_contexts
from .installation import Installation, install
from .overrides import MissingHostError, OtherSettingsError, UnknownHostError

WITHOUT_CUDA = {
    "TRITON_INTERPRET": "1",  # Triton has no compiler for a CPU
    "MAMBA_DETERMINISTIC": "1",  # megatron-core tries one configuration of a kernel, and times none
}
"""The environment that megatron-core's kernels need without a CUDA device, when they are imported."""


def run(options: argparse.Namespace) -> int:
    """Install, run the script and report; 1: cannot be installed, 2: the script has other settings."""
    rank = int(os.environ.get("RANK", "0"))
    with _log_to_stderr(logging.ERROR if rank else logging.INFO):
        _interpret_without_cuda(speaks=not rank)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what megatron-core imports
                installation = install(options.plan, options.eviction, options.cache_answers)
        except (UnknownHostError, MissingHostError, OtherSettingsError, ValueError) as error:
            _say(f"error: {error}")
            return 1 if isinstance(error, UnknownHostError | MissingHostError) else 2
        if not rank:
            _say(installation.describe())
        sys.argv[:] = [str(options.script), *options.arguments]
        sys.path.insert(0, str(options.script.resolve().parent))
        exit_code = 1
        try:
            runpy.run_path(str(options.script), run_name="__main__")
            exit_code = 0
        except SystemExit as leaving:
            exit_code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            raise
        except OtherSettingsError as error:  # of an `install` in the script; this command's came first
            _say(f"error: {error}")
            exit_code = 2
        finally:
            _report(options, installation, rank, exit_code)
    return exit_code


def _report(options: argparse.Namespace, installation: Installation, rank: int, exit_code: int) -> None:
    if rank == 0 or exit_code:
        for line in described(built_contexts):
            _say(line if rank == 0 else f"rank {rank}: {line}")
    if options.json is not None:
        path = options.json
        if rank:
            path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
        content = as_dict(installation, built_contexts, rank, exit_code)
        try:
            path.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            _say(f"error: {options.json} cannot be written: {error.strerror}")


def _interpret_without_cuda(speaks: bool) -> None:
    """Set `WITHOUT_CUDA` where no CUDA device is visible, before Triton is imported and reads it."""
    missing_variables = {name: value for name, value in WITHOUT_CUDA.items() if name not in os.environ}
    if torch.cuda.is_available() or not missing_variables:
        return
    os.environ.update(missing_variables)
    if speaks:
        settings = " ".join(f"{name}={value}" for name, value in missing_variables.items())
        _say(f"no CUDA device is visible; setting {settings}")


@contextmanager
def _log_to_stderr(level: int) -> Iterator[None]:
    """Show our own log lines once, whatever logging the script sets up."""
    logger = logging.getLogger(__package__)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("mambaslots.mcore: %(message)s"))
    handler.setLevel(level)
    level_before = logger.level
    propagate_before = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before


def _say(line: str) -> None:
    print(f"mambaslots.mcore: {line}", file=sys.stderr, flush=True)


def described(contexts: Sequence[BuiltContext]) -> list[str]:
    """Lines of text: one that counts the contexts, and up to four for each of them."""
    if not contexts:
        return [
            "no DynamicInferenceContext was built, so mambaslots had nothing to do; in the script, build "
            f"megatron-core's dynamic engine, and {SETTINGS}"
        ]
    lines = [f"{len(contexts)} {'context' if len(contexts) == 1 else 'contexts'} built"]
    return lines + [f"  {line}" for context in contexts for line in _described(context)]


def _described(context: BuiltContext) -> list[str]:
    name = f"context {context.number}"
    stats = context.stats
    if context.idle_reason:
        return [f"{name} cached no states: {context.idle_reason}"]
    if not stats.num_requests:
        return [f"{name}: no request was added"]
    reasons = [f"{reason} {count:,}" for reason, count in stats.computed_by_reason.items() if count]
    num_slots = stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots
    states = (
        f"{stats.num_committed_slots:,} of {num_slots:,} slots hold one, {stats.num_states_committed:,} "
        f"taken, {stats.num_states_evicted:,} evicted, {stats.num_dropped_checkpoints:,} planned and dropped"
    )
    return [
        f"{name}: requests {stats.num_requests:,}, prompt tokens {stats.num_prompt_tokens:,}, resumed "
        f"{stats.num_resumed_tokens:,} (hit rate {stats.hit_rate:.1%}), computed "
        f"{stats.num_computed_tokens:,}",
        f"  computed by reason: {', '.join(reasons) or 'none'}",
        f"  states: {states}",
        *([f"  {SHORT_LIVED}"] if context.is_short_lived else []),
    ]


def as_dict(
    installation: Installation, contexts: Sequence[BuiltContext], rank: int, exit_code: int
) -> dict[str, Any]:
    """What `--json` writes: versions and settings, the rank, the script's exit code, all contexts."""
    return installation.as_dict() | {
        "rank": rank,
        "exit_code": exit_code,
        "contexts": [
            {"number": context.number, "idle_reason": context.idle_reason or None}
            | {"hit_rate": context.stats.hit_rate, **asdict(context.stats)}
            for context in contexts
        ],
    }
