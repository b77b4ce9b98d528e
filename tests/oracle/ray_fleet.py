"""Replicas of a tiny model on Ray Serve, in a cluster of this process."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import openai
import ray
from mambaslots.fleet import FleetSettings
from mambaslots.fleet.fleet_server import QUIET, RAY_DEFAULTS, fleet_application, usable_port
from mambaslots.fleet.replica import ReplicaStatus
from mambaslots.loaded_model import LoadedText
from mambaslots.serve import ServerSettings
from mambaslots.text import GenerationDefaults
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster

from .served import small_config, tiny_loaded

ROOT = Path(__file__).parents[2]
SALT_KEY = "the key of all replicas of a test"
VERSION = "the tiny model of bytes"
PORTS: list[int] = []
"""The port of Ray Serve's proxy in the cluster of this process is the last one."""
BLOCK = small_config().block_size_tokens


@dataclass(frozen=True)
class TinyEngine:
    """Makes an engine of the tiny model of bytes; can be pickled."""

    config: Mapping[str, Any]

    def __call__(self, groups: ms.ParallelGroups | None) -> ms.DynamicInferenceEngine:
        config = small_config(**{"salt_key": SALT_KEY, **self.config})
        model = tiny_loaded().model
        if groups is not None:
            model = ms.models.HybridLM(model.config, groups=groups)
        leads = groups is not None and not groups.rank
        engine = (msd.LeadingEngine if leads else ms.DynamicInferenceEngine)(model, config)
        engine.set_weights_version(VERSION)
        return engine


def tiny_text() -> LoadedText:
    loaded = tiny_loaded()
    return LoadedText(loaded.text, GenerationDefaults(), loaded.folder)


@cache
def _uncached() -> ms.DynamicInferenceEngine:
    return ms.DynamicInferenceEngine(tiny_loaded().model, small_config(enable_prefix_caching=False))


def expected_tokens(prompt: Sequence[int], **sampling: Any) -> list[int]:
    """What one engine without a cache answers."""
    (result,) = _uncached().generate([list(prompt)], ms.SamplingParams(**sampling))
    return result.tokens


@contextmanager
def ray_cluster(num_cpus: int = 8) -> Iterator[Cluster]:
    """Ray on this machine, as a node of `num_cpus` to which others can be added; workers find this tree."""
    paths = os.pathsep.join([str(ROOT / "stubs"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    os.environ |= RAY_DEFAULTS
    cluster = Cluster()
    try:
        add_node(cluster, num_cpus)
        ray.init(
            address=cluster.address, log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        PORTS.append(usable_port("127.0.0.1", 0))
        http = {"host": "127.0.0.1", "port": PORTS[-1]}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Cluster, num_cpus: int) -> Any:
    """A node of the cluster as processes of this machine, once Ray schedules on it."""
    node = cluster.add_node(
        num_cpus=num_cpus, num_gpus=0, include_dashboard=False, object_store_memory=100 * 2**20
    )
    cluster.wait_for_nodes()
    return node


def workers(word: str) -> list[int]:
    """Ray's workers of this process whose title has this word."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_text()
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(parent)
        if title.startswith("ray::") and word in title and state != "Z":
            found.append(int(folder.name))
    return sorted(pid for pid in found if os.getpid() in _ancestors(pid, parents))


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while (pid := parents.get(pid, 0)) > 1:
        found.append(pid)
    return found


@dataclass
class Fleet:
    """Replicas that serve over loopback."""

    port: int
    server: ServerSettings
    settings: FleetSettings
    config: Mapping[str, Any]

    def deploy(self, **changes: Any) -> None:
        """Begin, or change settings: Ray starts and ends replicas until there are as many as wanted."""
        self.settings = replace(self.settings, **changes)
        application = fleet_application(
            TinyEngine(self.config), tiny_text, SALT_KEY, self.server, self.settings
        )
        serve.run(application, name=self.settings.name, route_prefix="/")

    @property
    def client(self) -> openai.OpenAI:
        return self.client_of("key")

    def client_of(self, key: str) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)

    def complete(self, prompt: Sequence[int], key: str = "key", **sampling: Any) -> tuple[list[int], int]:
        """The tokens of an answer, and how many tokens of the prompt were resumed."""
        with self.client_of(key) as client:
            answer = client.completions.create(
                model="tiny", prompt=list(prompt), extra_body={"return_token_ids": True}, **sampling
            )
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        tokens = answer.choices[0].model_dump()["token_ids"]
        return tokens, usage.prompt_tokens_details.cached_tokens or 0

    def stream(self, prompt: Sequence[int], **sampling: Any) -> Iterator[list[int]]:
        """The tokens of a streamed answer, as they come."""
        body = {"return_token_ids": True}
        with self.client as client:
            for part in client.completions.create(
                model="tiny", prompt=list(prompt), stream=True, extra_body=body, **sampling
            ):
                for choice in part.choices:
                    yield choice.model_dump().get("token_ids") or []

    # ---- what an operator does

    @property
    def replicas(self) -> Any:
        return serve.get_deployment_handle("EngineReplica", self.settings.name)

    def statuses(self) -> list[ReplicaStatus]:
        answers = self.replicas.broadcast("status").results(timeout_s=30, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, ReplicaStatus)]

    def kill(self, status: ReplicaStatus, rank: int = 0, signal: int = signal.SIGKILL) -> None:
        os.kill(status.processes[rank], signal)

    def is_alive(self, status: ReplicaStatus) -> bool:
        """Whether the leading process is there, stopped or not."""
        stat = Path(f"/proc/{status.processes[0]}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def holder(self) -> ReplicaStatus:
        """The replica that runs something now."""
        (busy,) = (status for status in self.statuses() if status.num_running)
        return busy

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.1)

    def wait_for_replicas(self, number: int) -> None:
        self.wait_until(lambda: len(self.statuses()) == number, f"{number} replicas")

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return json.loads(self._read(path))

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as reply:
            content: bytes = reply.read()
        return content.decode()

    def metrics(self) -> dict[str, float]:
        """Metrics by name and labels, and, by name alone, those of all labels added up."""
        text = self._read("/metrics")
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = json.dumps(sample.labels, sort_keys=True)
                values[f"{sample.name} {labels}"] = sample.value
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


@contextmanager
def fleet(
    settings: Mapping[str, Any], config: Mapping[str, Any] | None = None, **server: Any
) -> Iterator[Fleet]:
    """Replicas in the cluster of this process, which has no others."""
    given = {"cpus_per_rank": 0.1, "max_requests": 8, "health_period_s": 1.0, "drain_timeout_s": 30.0}
    made = Fleet(
        PORTS[-1],
        ServerSettings(model_name="tiny", port=PORTS[-1], **server),
        FleetSettings(**(given | dict(settings))),
        config or {},
    )
    made.deploy()
    try:
        yield made
    finally:
        serve.delete(made.settings.name)
