"""The drop-in for megatron-core: `mambaslots.mcore.install()` before the inference context is built.

Importing this package imports no megatron-core; `install` does.

install, run_script, versions        what a user calls; the runner; which sources of the host are known
overrides, host_record               how one method is replaced; what is remembered of one host context
built_contexts                       the contexts of this process, and their figures
slot_allocator                       our allocator as the host's context holds it
admission, mixer, gated_delta_net, cached_answers, lifecycle, stages
                                     the corrections: prefills, the recurrent layers, answers, resets,
                                     pipeline stages
self_test, recurrence                what is asked of a host whose sources are not known; import megatron-core
"""

from .built_contexts import stats
from .host_record import HostStats
from .install import install, installed, uninstall
from .overrides import UnknownHostError

__all__ = ["HostStats", "UnknownHostError", "install", "installed", "stats", "uninstall"]
