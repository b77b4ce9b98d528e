"""Imports filelock without its audit hook, which would take a fiftieth of the tests' time.

Python calls such a hook at each `id`, import and open of a process. filelock's refuses forks while another
thread opens or closes a lock: no process of the tests does both.
"""

import sys
from unittest.mock import patch

with patch.object(sys, "addaudithook", lambda hook: None):
    import filelock  # noqa: F401
