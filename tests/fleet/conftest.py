"""Tests with Ray: `make test-fleet` runs them one after the other, in one cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

FOLDER = f"{Path(__file__).parent}/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(FOLDER):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cluster() -> "Iterator[Cluster]":
    from oracle.ray_fleet import ray_cluster

    with ray_cluster() as made:
        yield made
