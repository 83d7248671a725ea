"""Tests that a pool whose writer is killed at any moment holds the state after some complete call, and that no call
that returned is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.pool import ExperiencePool
from tests.experience.pool_world import contents, solved
from tests.strategies import NIGHTLY

SETTINGS = ReplaySettings(capacity_per_task=2, max_age=30, keep_failures=2)
KILLS = 30 if NIGHTLY else 12


def operate(pool: ExperiencePool, number: int) -> None:
    """Make the ``number``-th change, which depends only on its number and on the pool."""
    random = np.random.default_rng(number)
    marks = pool.stats()["marks"]
    kind = random.choice(["observe", "mark", "rewind", "forget", "used"], p=[0.7, 0.1, 0.1, 0.05, 0.05])
    if kind == "mark" or not marks:
        pool.mark()
    elif kind == "rewind":
        pool.rewind(int(random.choice(marks)))
    elif kind == "forget":
        pool.forget(marks[-1])
    elif kind == "used":
        names = [str(n) for n in range(12)]
        kept = [*pool.stored(names).values(), *pool.failures(names).values()]
        pool.used([stored.key for each in kept for stored in each])
    else:
        names = random.choice(12, 3, replace=False)
        pool.observe(
            [solved(str(n), int(random.integers(0, 5)), 4, first=4 * number, version=number) for n in names], number
        )


def _work(path: Path, number: int, done: Connection) -> None:
    with ExperiencePool(path, SETTINGS) as pool:
        while True:
            operate(pool, number)
            number += 1
            done.send_bytes(b".")


def _killed(path: Path, number: int, after: float) -> int:
    """Kill a child that changes the pool from the ``number``-th change on; return how many changes it reported."""
    context = multiprocessing.get_context("fork")
    said, saying = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(path, number, saying), daemon=True)
    child.start()
    saying.close()
    said.poll(30)  # wait for the first report
    time.sleep(after)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    acknowledged = 0
    try:
        while said.recv_bytes():
            acknowledged += 1
    except EOFError:
        return acknowledged


def test_a_killed_writer_loses_no_change_whose_call_returned(tmp_path: Path) -> None:
    path, random, number, between = tmp_path / "killed.sqlite", np.random.default_rng(0), 0, 0
    with ExperiencePool(tmp_path / "reference.sqlite", SETTINGS) as reference:
        for _ in range(KILLS):
            acknowledged = _killed(path, number, float(random.uniform(0.0, 0.12)))
            for _ in range(acknowledged):
                operate(reference, number)
                number += 1
            with ExperiencePool(path, SETTINGS) as pool:
                assert pool.verify() == []
            found = contents(path, marks=True)
            if found != contents(reference.path, marks=True):  # killed between a commit and its report
                operate(reference, number)
                number, between = number + 1, between + 1
                assert found == contents(reference.path, marks=True)
        assert number > 3 * KILLS
        assert between < KILLS  # at least one kill left only reported changes
