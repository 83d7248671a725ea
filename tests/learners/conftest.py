"""Ends the shared processes of the sharded learners' tests after the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learners import many


@pytest.fixture(scope="session", autouse=True)
def _shared_processes() -> Iterator[None]:
    yield
    while many.shared:
        count, processes = many.shared.popitem()
        assert processes.end() == [0] * count
