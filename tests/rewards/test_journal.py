"""Tests of `gleanrl.rewards.journal.Journal`, the SQLite file of finished scores: a stored score survives a kill of the
process, and damaged files, foreign databases and full disks give clear errors."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.rewards import RewardAgent
from gleanrl.rewards.journal import Journal
from gleanrl.simulate import virtual_time
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.rewards.worlds import Service, count_rows, make_task, make_trajectory
from tests.strategies import examples

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def key(number: int) -> str:
    return f"{number:032x}"


def use(path: Path, what: Any) -> Any:
    """Open the journal at ``path``, await ``what(journal)``, close the journal and return the result."""

    async def main() -> Any:
        journal = Journal(path)
        try:
            return await what(journal)
        finally:
            await journal.aclose()

    return asyncio.run(main())


@settings(max_examples=examples(20))
@given(value=FLOATS, parts=st.dictionaries(st.text(), FLOATS), explanation=st.none() | st.text())
def test_a_stored_score_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: float, parts: dict[str, float], explanation: str | None
) -> None:
    path = tmp_path_factory.mktemp("journal") / "rewards.sqlite"
    score = Score(value, parts=parts, explanation=explanation)

    async def main() -> None:
        journal = Journal(path)
        await journal.put(key(1), score)
        assert journal.get(key(1)) == score
        assert journal.get(key(2)) is None
        await journal.aclose()

    virtual_time.run(main())


def test_scores_that_arrive_during_a_commit_share_the_next_commit(tmp_path: Path) -> None:
    commits: list[int] = []

    async def many(journal: Journal) -> None:
        commit = journal._commit
        journal._commit = lambda rows: (commits.append(len(rows)), commit(rows))[1]  # type: ignore[method-assign]
        await asyncio.gather(*(journal.put(key(n), Score(float(n))) for n in range(500)))
        assert count_rows(journal.path) == 500

    use(tmp_path / "rewards.sqlite", many)
    assert sum(commits) == 500
    assert len(commits) <= 3


def test_a_failed_score_is_refused(tmp_path: Path) -> None:
    async def put(journal: Journal) -> None:
        with pytest.raises(ValueError, match="only a valid score"):
            await journal.put(key(1), Score.failed("no"))

    use(tmp_path / "rewards.sqlite", put)


CHILD = """
import asyncio, sys
from gleanrl.rewards import RewardAgent
from tests.rewards.worlds import Service, count_rows, make_task, make_trajectory

class Loud(RewardAgent):
    async def one(self, n):
        score = await self.score(make_task(), make_trajectory(make_task(), str(n)))
        print(n, score.value, flush=True)

async def main():
    async with Loud(Service((0.0, 0.02)), journal=sys.argv[1]) as agent:
        async with asyncio.TaskGroup() as group:
            for n in range(100_000):
                group.create_task(agent.one(n))
                await asyncio.sleep(0)

asyncio.run(main())
"""


def test_scores_delivered_before_a_kill_are_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "rewards.sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    delivered = [process.stdout.readline() for _ in range(300)]
    process.send_signal(signal.SIGKILL)
    delivered += process.stdout.readlines()
    process.wait()
    answers = {int(line.split()[0]) for line in delivered if line.endswith("\n")}
    assert len(answers) >= 300
    service = Service((1, 1))

    async def main() -> None:
        async with RewardAgent(service, journal=path) as agent:
            tasks = [agent.score(make_task(), make_trajectory(make_task(), str(n))) for n in answers]
            assert {score.value for score in await asyncio.gather(*tasks)} == answers
            assert agent.metrics()["service/journal_hits"] == len(answers)
            again = await agent.score(make_task(), make_trajectory(make_task(), "-1"))
            assert again.value == -1.0

    virtual_time.run(main())
    assert [name for _, name in service.calls] == ["-1"]


def test_a_new_version_of_the_reward_is_called_despite_the_journal(tmp_path: Path) -> None:
    async def main(version: str) -> int:
        service = Service((0, 0))
        service.version = version
        async with RewardAgent(service, journal=tmp_path / "rewards.sqlite") as agent:
            await agent.score(make_task(), make_trajectory(make_task(), "1"))
        return len(service.calls)

    assert [virtual_time.run(main(version)) for version in ("a", "a", "b")] == [1, 0, 1]


@pytest.mark.parametrize("damage", ["header", "middle", "cut", "not a database"])
def test_a_damaged_file_is_renamed_with_a_one_line_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rewards.sqlite"

    async def fill(journal: Journal) -> None:
        await asyncio.gather(*(journal.put(key(n), Score(1.0, explanation="x" * 100)) for n in range(500)))

    use(path, fill)
    data = path.read_bytes()
    ruined = {
        "header": b"x" * 64 + data[64:],
        "middle": data[:4096] + b"\xff" * 8192 + data[12288:],
        "cut": data[: len(data) // 2],
        "not a database": b"hello, world\n" * 1000,
    }[damage]
    path.write_bytes(ruined)
    with caplog.at_level(logging.WARNING):
        use(path, fill)
    (record,) = caplog.records
    assert "damaged" in record.getMessage()
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    assert (tmp_path / "rewards.sqlite.damaged-1").read_bytes() == ruined
    assert count_rows(path) == 500


def test_damage_found_while_reading_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "rewards.sqlite"

    async def fill(journal: Journal) -> None:
        await asyncio.gather(*(journal.put(key(n), Score(1.0, explanation="x" * 100)) for n in range(500)))

    def overwrite() -> None:
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))

    async def read(journal: Journal) -> None:
        await asyncio.to_thread(overwrite)
        with pytest.raises(UserError, match="cannot be read"):
            journal.get(key(250))

    use(path, fill)
    use(path, read)


def test_a_database_of_another_program_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"pool.sqlite.*another database"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_opened_raises_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "rewards.sqlite", tmp_path):
        with pytest.raises(UserError, match="cannot be opened"):
            Journal(path)


def test_a_full_disk_raises_a_user_error_in_every_waiting_call(tmp_path: Path) -> None:
    async def main() -> None:
        async def reward(request: Any) -> Score:
            return Score(1.0, explanation=request.response)

        async with RewardAgent(reward, journal=tmp_path / "rewards.sqlite") as agent:
            assert agent._journal is not None
            agent._journal._database.execute("PRAGMA max_page_count = 1")
            jobs = [agent.score(make_task(), make_trajectory(make_task(), str(n) * 3000)) for n in range(9)]
            results = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(result, UserError) and "full" in str(result) for result in results)

    virtual_time.run(main())


@pytest.mark.parametrize(
    "returned",
    [
        Score(np.float32(0.5)),
        Score(np.float64(0.5), parts={"style": np.float32(1.0), "no": math.nan, "text": "x"}),  # type: ignore[dict-item]
        Score(0.5, parts={"length": np.int64(3), 7: 1.0}, explanation=["well"]),  # type: ignore[dict-item, arg-type]
        Score(np.bool_(True), explanation="x" * 9000),
        {"score": np.float32(0.5), "array": np.zeros(3), "one": np.ones(1)},
        Score(10**400 // 10**399),
    ],
    ids=str,
)
def test_scores_with_numpy_numbers_and_invalid_parts_are_stored_as_floats(tmp_path: Path, returned: Any) -> None:
    async def reward(request: Any) -> Any:
        return returned

    async def main() -> list[Score]:
        async with RewardAgent(reward, journal=tmp_path / "rewards.sqlite", cache=0) as agent:
            return [await agent.score(make_task(), make_trajectory(make_task(), "1")) for _ in range(2)]

    first, again = virtual_time.run(main())
    assert first == again
    assert first.valid
    assert {type(first.value), *map(type, first.parts.values())} == {float}
    assert all(isinstance(name, str) for name in first.parts)
    assert first.explanation is None or len(first.explanation) <= 4000


def test_a_score_with_a_non_numeric_value_fails_without_affecting_others(tmp_path: Path) -> None:
    class Odd:
        def __float__(self) -> float:
            return 1.0

    async def reward(request: Any) -> Any:
        return Score({"1": Odd(), "2": 10**400}[request.response] if request.response != "3" else 3.0)  # type: ignore[arg-type]

    async def main() -> list[bool]:
        async with RewardAgent(reward, journal=tmp_path / "rewards.sqlite") as agent:
            return [(await agent.score(make_task(), make_trajectory(make_task(), str(n)))).valid for n in (1, 2, 3)]

    assert virtual_time.run(main()) == [False, False, True]


def test_bools_are_read_back_as_floats(tmp_path: Path) -> None:
    async def what(journal: Journal) -> Score | None:
        await journal.put(key(1), Score(True, parts={"right": True}))
        return journal.get(key(1))

    assert use(tmp_path / "rewards.sqlite", what) == Score(1.0, parts={"right": 1.0})
