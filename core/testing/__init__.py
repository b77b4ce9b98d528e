"""For authors of models: `check_model` says what a model does wrong, and what to do about it."""

from .check_model import ModelError, check_model

__all__ = ["ModelError", "check_model"]
