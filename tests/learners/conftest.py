"""Ends the shared processes of the sharded learners' tests after each file.

Their process groups have threads that wake up a hundred times a second, so they would slow down the files after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learners import many


@pytest.fixture(scope="module", autouse=True)
def _shared_processes() -> Iterator[None]:
    yield
    while many.shared:
        count, processes = many.shared.popitem()
        assert processes.end() == [0] * count
