"""What a checkpoint says about how its answers are chosen and where they end."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..checkpoint_files import CONFIG, CheckpointError, read_optional_object, section
from ..sampling_params import SamplingParams

_FILE = "generation_config.json"


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

        Without `do_sample` decoding is greedy, as in transformers.

        Raises:
            CheckpointError: a value is none that `SamplingParams` accepts.
        """
        said = read_optional_object(folder / _FILE)
        text_config = section(folder / CONFIG, config, "text_config")
        stops = _first(said.get("eos_token_id"), text_config.get("eos_token_id"), config.get("eos_token_id"))
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
