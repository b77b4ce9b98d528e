"""For authors of models: `check_model` says what a model does wrong, and what to do about it.

check_model      a model's answers in all ways of serving a text, compared
rules            the rules that a model keeps, and the error that names one
step_memory      what a model may read in a step is real, the rest is poisoned
"""

from .check_model import check_model
from .rules import ModelError

__all__ = ["ModelError", "check_model"]
