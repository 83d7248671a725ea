"""Settings of all tests: no access to the Hugging Face Hub, a temporary cache folder, and one thread per process.

Each worker of pytest-xdist imports this file, so that each has its own cache. All tests of a file run in one worker, so
that the file's fixtures are made once. All tests that start Ray run in one worker and share a cluster. Tests that are
marked with the same `xdist_group` run in one worker and share other fixtures that are expensive to start.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import hypothesis
import pytest

# These variables only have an effect if they are set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="gleanrl-test-cache-")
os.environ["GLEANRL_CACHE"] = _cache.name

# A shell starts background jobs with SIGINT ignored, and child processes inherit that. Ctrl-C could not be tested then.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# HYPOTHESIS_PROFILE=nightly draws more examples, and different ones in each run. See also `tests.strategies.examples`.
hypothesis.settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=100, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test without an `xdist_group` the group of its file, for `--dist loadgroup`. Long groups come first."""
    shared: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        if item.get_closest_marker("xdist_group"):
            shared.add(item)
        else:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: (item not in shared, "tests/cli" not in item.path.as_posix()))


@pytest.hookimpl(trylast=True)  # after the fixtures have ended
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes that the tests of the group "ranks" share when no other of these tests comes next.

    They are not ended earlier because starting them takes longer than most of these tests. They are not kept longer
    because their process groups have threads that wake up a hundred times a second, which slows down other tests.
    """
    marker = nextitem.get_closest_marker("xdist_group") if nextitem else None
    many = sys.modules.get("tests.learners.many")
    if many is None or (marker and "ranks" in marker.args):
        return
    while many.shared:
        count, processes = many.shared.popitem()
        assert processes.end() == [0] * count
