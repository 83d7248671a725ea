"""Settings of every test: no network, a cache of its own, and threads that leave the other cores free.

Each worker of pytest-xdist imports this file, so each has its own cache. A file is the unit that workers share out,
which keeps its fixtures in one process; all files that start Ray go to one worker and share one cluster, and all that
mark themselves with the same `xdist_group` share what else is expensive to start.
"""

from __future__ import annotations

import os
import signal
import tempfile

import hypothesis
import pytest

# before torch is loaded
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="gleanrl-test-cache-")
os.environ["GLEANRL_CACHE"] = _cache.name

# a shell starts background jobs with SIGINT ignored, which children inherit: then no Ctrl-C could be tested
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# HYPOTHESIS_PROFILE=nightly draws more examples, and other ones each time; see `tests.strategies.examples`
hypothesis.settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=100, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign each test without a group to its file's, for `--dist loadgroup`. The longest groups start first."""
    shared: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        if item.get_closest_marker("xdist_group"):
            shared.add(item)
        else:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: (item not in shared, "tests/cli" not in item.path.as_posix()))
