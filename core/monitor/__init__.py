"""What an operator watches: `Monitor` keeps figures of a running engine.

It observes `engines`. Figures and advice are of requests, which `contexts` has, and of counts of `cache`.

monitor                 observes an engine; what the page shows of it
figures                 what is counted: durations, tenants, requests, figures over time
metrics                 the name and meaning of each figure, for /metrics, page, board and docs
advice                  why prompt tokens were computed, and the setting that would have saved them
"""

from .monitor import Monitor

__all__ = ["Monitor"]
