"""What each figure of an engine is: said once for /metrics, the page, the Grafana board and the docs."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from .figures import MonitorFigures


class Figure(NamedTuple):
    """A figure of an engine: its name and help, where `MonitorFigures` (of a tenant, `TenantFigures`) has it,
    the label that tells its values apart, and where `Monitor.snapshot` shows it; "" for none.
    """

    name: str
    help: str
    of: str
    label: str = ""
    key: str = ""

    def value(self, figures: MonitorFigures) -> Any:
        """A number, a mapping of label to number, or a `DurationHistogram`."""
        if self.label == "tenant":
            return {tenant.name: getattr(tenant, self.of) for tenant in figures.tenants}
        return attrgetter(self.of)(figures)

    def show(self, figures: MonitorFigures, snapshot: dict[str, Any]) -> None:
        """Set its value at `key` of a snapshot; values by label become entries there."""
        *folders, name = self.key.split(".")
        for folder in folders:
            snapshot = snapshot.setdefault(folder, {})
        value = self.value(figures)
        if isinstance(value, Mapping):
            snapshot.setdefault(name, {}).update(value)
        else:
            snapshot[name] = getattr(value, "percentiles", value)


_CACHE = "stats.cache."
_TIERS = "stats.cache.tiers."
_DRAFTS = "stats.speculation."
COUNTERS = (
    Figure("prompt_tokens", "prompt tokens, resumed and computed", _CACHE + "num_prompt_tokens",
           key="tokens.prompt"),
    Figure("resumed_prompt_tokens", "prompt tokens that were resumed, not computed",
           _CACHE + "num_resumed_tokens", key="tokens.resumed"),
    Figure("computed_prompt_tokens", "computed prompt tokens, by reason",
           _CACHE + "computed_by_reason", "reason", "tokens.by_reason"),
    Figure("recomputed_tokens", "tokens computed again after a preemption or a failed step; if they "
           "are many, the KV pool is too small", _CACHE + "num_recomputed_tokens", key="tokens.recomputed"),
    Figure("generated_tokens", "generated tokens", "num_generated", key="tokens.generated"),
    Figure("drafted_tokens", "drafted tokens", _DRAFTS + "num_drafted"),
    Figure("accepted_drafted_tokens", "drafted tokens that were accepted", _DRAFTS + "num_accepted"),
    Figure("requests_added", "requests that were queued", "num_added"),
    Figure("requests_ended", "requests that ended, by finish reason", "num_ended", "finish_reason"),
    Figure("states_committed", "states stored in the cache", _CACHE + "num_states_committed"),
    Figure("states_left", "states removed from the cache, by cause", _CACHE + "states_removed_by_cause",
           "cause", "evictions.by_cause"),
    Figure("states_refused", "states not stored, because each slot was pinned, reserved, or held a more "
           "valuable state", _CACHE + "num_states_refused"),
    Figure("states_evicted_unused", "evicted states that no request had resumed from",
           _CACHE + "num_states_evicted_unused"),
    Figure("tier_states_fetched", "evicted states copied back to the device, by tier: host or disk",
           "fetched_by_tier", "tier"),
    Figure("tier_copies_damaged", "copies of evicted states with a wrong checksum; their tokens were "
           "computed again", _TIERS + "num_copies_damaged"),
    Figure("kv_blocks_registered", "KV blocks stored in the cache", _CACHE + "num_kv_blocks_registered"),
    Figure("kv_blocks_left", "KV blocks removed from the cache, by cause",
           _CACHE + "kv_blocks_removed_by_cause", "cause"),
    Figure("tenant_requests", "requests of a tenant", "num_requests", "tenant"),
    Figure("tenant_prompt_tokens", "prompt tokens of a tenant", "num_prompt_tokens", "tenant"),
    Figure("tenant_resumed_prompt_tokens", "prompt tokens of a tenant that were resumed",
           "num_resumed_tokens", "tenant"),
    Figure("cache_rebuilds", "interrupted or failed calls after which all cached prefixes were dropped",
           "stats.num_rebuilds"),
)  # fmt: skip
GAUGES = (
    Figure("requests_waiting", "requests in the queue", "stats.num_waiting", key="engine.waiting"),
    Figure("requests_running", "requests that hold memory, paused ones included", "stats.num_running",
           key="engine.running"),
    Figure("requests_paused", "running requests that wait for a KV block", "stats.num_paused",
           key="engine.paused"),
    Figure("requests_max", "requests that can run at once", "max_requests", key="engine.max_requests"),
    Figure("state_slots", "state slots by use: free, reserved (a step will write the state), committed (a "
           "cached state), live (the state of a running request)", "slots_by_use", "use", "pools.states"),
    Figure("state_slots_pinned", "committed state slots that cannot be evicted now",
           _CACHE + "num_pinned_slots", key="pools.states.pinned"),
    Figure("tier_states", "copies of evicted states, by tier: host or disk", "states_by_tier", "tier"),
    Figure("kv_blocks", "KV blocks by use: free, held (by running requests or pins), cached (not held)",
           "kv_blocks_by_use", "use", "pools.kv"),
    Figure("warnings", "warnings that name a setting to change", "num_warnings"),
)  # fmt: skip
DURATIONS = (
    Figure("state_eviction_age", "time from the last use of a state to its eviction; should exceed the pause "
           "between two turns of a conversation", "eviction_age", key="evictions.age_s"),
    Figure("time_to_first_token", "time from a request's arrival to its first token", "first_token",
           key="latency.ttft_s"),
    Figure("queue_time", "time from a request's arrival to its first step", "queue"),
    Figure("inter_token", "time between two tokens of an answer", "inter_token", key="latency.inter_token_s"),
    Figure("step", "duration of a step", "step", key="latency.step_s"),
)  # fmt: skip
FAILED_ACCEPTS = Figure(
    "failed_accepts",
    "how often the server could not accept a connection, because file descriptors or memory ran out",
    "count",
)
"""Of a server that accepts connections itself."""
FIGURES = (*COUNTERS, *GAUGES, *DURATIONS)
