"""Fixtures for the tests of the Ray runtime: one local Ray per test process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from gleanrl.config.settings import RaySettings
from gleanrl.runtime.ray.cluster import Cluster, open_cluster
from gleanrl.utils.progress import Silent


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The ray module, with a local Ray of 16 logical CPUs started for the session."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    # Ray's default is 15, with which actors hardly run on a machine that other tests use too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Cluster]:
    """A cluster with room for the actors of one run; each kind of actor may be restarted twice."""
    kinds = {"learner": 1, "sampler": 2, "environment": 1, "reward": 1}
    with open_cluster(RaySettings(max_restarts=2), Silent(), kinds) as cluster:
        yield cluster
