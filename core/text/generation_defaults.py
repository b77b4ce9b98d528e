"""What a checkpoint says about how its answers are chosen and where they end."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..files import CONFIG, CheckpointError, read_optional_object, section
from ..request import SamplingParams

logger = logging.getLogger(__name__)

_FILE = "generation_config.json"
_NOT_APPLIED = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "no_repeat_ngram_size": 0, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {},
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0,
    "stop_strings": [], "num_beams": 1, "penalty_alpha": None,
}  # fmt: skip
"""Fields of other libraries that change answers, and the value of each that changes none."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of `SamplingParams` for one model.

    Attributes:
        stop_token_ids: tokens that end an answer.
        temperature, top_k, top_p: None for greedy decoding, or for no limit.
        num_tokens_to_generate: None where the checkpoint names no number.
    """

    stop_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    num_tokens_to_generate: int | None = None

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> "GenerationDefaults":
        """What `generation_config.json` of `folder` says. Stop tokens may also stand in its `config`.

        Without `do_sample` decoding is greedy, as in transformers. Without `top_k` all tokens are kept, where
        transformers keeps the 50 most likely. What the file says and is not applied is named at INFO.

        Raises:
            CheckpointError: a value is none that `SamplingParams` accepts.
        """
        said = read_optional_object(folder / _FILE)
        text_config = section(folder / CONFIG, config, "text_config")
        stops = _first(said.get("eos_token_id"), text_config.get("eos_token_id"), config.get("eos_token_id"))
        ignored = [name for name, none in _NOT_APPLIED.items() if said.get(name) not in (None, none)]
        if ignored:
            logger.info("%s: not applied: %s", folder / _FILE, ", ".join(ignored))
        drawn: dict[str, Any] = (
            {name: said.get(name) for name in ("top_k", "top_p")} if said.get("do_sample") else {}
        )
        if said.get("do_sample"):
            drawn["temperature"] = _first(said.get("temperature"), 1.0)
        try:
            params = SamplingParams(
                stop_token_ids=tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,),
                num_tokens_to_generate=_first(said.get("max_new_tokens"), 1),
                **drawn,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder / _FILE}: {error}") from error
        values = {each.name: getattr(params, each.name) for each in fields(cls)}
        if said.get("max_new_tokens") is None:
            values["num_tokens_to_generate"] = None
        return cls(**values)

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """`SamplingParams` with these defaults and `overrides`, which are arguments of `SamplingParams`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return SamplingParams(
            **{name: value for name, value in values.items() if value is not None} | overrides
        )


def _first(*values: Any) -> Any:
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
