"""The drop-in for megatron-core: `mambaslots.mcore.install()` before the inference context is built.

Importing this package imports neither megatron-core nor torch; its names do at their first use.

installation                         what a user calls: `install` and its reversal
__main__, run_script                 the command line of the runner, parsed without torch; the runner
versions                             which sources of the host are known
overrides, host_record               how one method is replaced; what is remembered of one host context
built_contexts                       the contexts of this process, and their figures
slot_allocator                       our allocator as the host's context holds it
prefill_chunks, mixer, gated_delta_net, cached_answers, lifecycle, stages
                                     the corrections: prefills, the recurrent layers, answers, resets,
                                     pipeline stages
reproductions, recurrence            what is asked of a host whose sources are not known; import megatron-core
"""

from typing import TYPE_CHECKING

from ..lazy_names import importer

if TYPE_CHECKING:
    from .built_contexts import HostStats, stats
    from .installation import install, installed, uninstall
    from .overrides import UnknownHostError

__all__ = ["HostStats", "UnknownHostError", "install", "installed", "stats", "uninstall"]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = importer(globals())
