"""Tests that docs/reference/metrics.md names every metric that is logged."""

from __future__ import annotations

import re
from pathlib import Path

from gleanrl.config.settings import RaySettings
from gleanrl.rewards.statistics import Statistics
from gleanrl.runtime.ray.cluster import Cluster
from gleanrl.schedule.timeline import DEVICE_WORK
from gleanrl.tracking.monitors import Console

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()


def test_the_page_names_every_metric_of_a_reward_agent() -> None:
    statistics = Statistics()
    statistics.total.add(1.0)
    statistics.answer.add(1.0)
    statistics.add_cost({"cost/prompt_tokens": 5.0, "cost/completion_tokens": 1.0})
    statistics.failed["timeout"] += 1
    logged = {re.sub("failed/.*", "failed/CAUSE", name) for name in statistics.metrics(0, 0)}
    assert len(logged) > 15
    assert not {name for name in logged if f"`{name}`" not in PAGE}


def test_the_page_names_every_part_of_a_steps_time() -> None:
    logged = {f"time/{kind}_s" for kind in (*DEVICE_WORK, "reward_wait", "environment", "idle", "step")}
    assert not {name for name in logged if f"`{name}`" not in PAGE}


def test_the_page_names_every_metric_of_a_ray_cluster() -> None:
    cluster = Cluster(RaySettings(), Console(), None, 1, {})
    cluster.seconds |= {"publish_s": 1.0, "publish_offer_s": 1.0, "publish_take_s": 1.0}
    assert not {name for name in cluster.metrics() if f"`{name}`" not in PAGE}
