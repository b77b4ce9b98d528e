"""For authors of models: `check_model` tells what a model does wrong, and what to do about it."""

from .model_check import check_model
from .report import Finding, ModelError, ModelReport, ScenarioReport
from .rules import Rule

__all__ = ["check_model", "Finding", "ModelError", "ModelReport", "Rule", "ScenarioReport"]
