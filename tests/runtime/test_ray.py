"""Tests of ``reward_actor``, which runs the reward agent as a Ray actor, on a local Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import Request
from gleanrl.runtime.ray import RewardHandle, reward_actor
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.rewards.graders import Scaled
from tests.rewards.worlds import make_task
from tests.test_house import imports, modules

TASK = make_task()


def test_only_the_ray_runtime_imports_ray() -> None:
    guilty = [name for name in modules() if any(i.target.split(".")[0] == "ray" for i in imports(name))]
    assert guilty
    assert all(name.startswith("gleanrl.runtime.ray.") for name in guilty)


class Noted:
    """An async reward whose score is the number in the response.

    No call returns before ``together`` calls have begun. Each call appends its response to a file.
    """

    version = "noted-1"

    def __init__(self, file: str, together: int = 1) -> None:
        self.file, self.together = file, together
        self.here = 0
        self.all: asyncio.Event | None = None

    async def __call__(self, request: Request) -> float:
        note(self.file, request.response)
        self.all = self.all or asyncio.Event()
        self.here += 1
        if self.here >= self.together:
            self.all.set()
        if request.response == "hang":
            await asyncio.Event().wait()
        await self.all.wait()
        return float(request.response)


def note(file: str, text: str) -> None:
    with open(file, "a") as out:
        out.write(f"{text}\n")


def pid(request: Request) -> int:
    return os.getpid()


def asked(path: Path) -> list[str]:
    return sorted(path.read_text().split())


@pytest.fixture
def made(ray: Any) -> Iterator[Any]:
    """`reward_actor`; its actors are closed when the test ends."""
    handles: list[RewardHandle] = []

    def make(*args: Any, **options: Any) -> RewardHandle:
        handles.append(reward_actor(*args, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close()


pytestmark = pytest.mark.ray


def test_groups_are_scored_and_post_processed_in_another_process(made: Any) -> None:
    handle = made(Scaled(2.0))
    groups = [[(TASK, "a" * n), (TASK, "abc")] for n in range(1, 4)]
    scores = handle.score_groups(group for group in groups)
    assert [[score.value for score in group] for group in scores] == [[-4, 0], [-2, 0], [0, 0]]
    assert handle.metrics()["service/scored"] == 4  # the repeated "abc" is scored once
    assert made(pid).score_groups([[(TASK, "x")]])[0][0].value != os.getpid()


def test_many_callers_in_several_processes_can_score_at_once(made: Any, ray: Any, tmp_path: Path) -> None:
    many = 300
    handle = made(Noted(str(tmp_path / "asked"), together=many), max_concurrency=many)

    async def main() -> list[Score]:
        return await asyncio.gather(*(handle.score(TASK, f"{n}") for n in range(many)))

    scores = asyncio.run(main())
    assert [score.value for score in scores] == list(range(many))
    assert asyncio.run(handle.finish(TASK, scores)) == scores

    @ray.remote(num_cpus=0)
    def elsewhere(given: RewardHandle) -> list[float]:
        return [score.value for score in given.score_groups([[(TASK, "7"), (TASK, "1000")]])[0]]

    assert ray.get(elsewhere.remote(handle)) == [7, 1000]
    assert len(asked(tmp_path / "asked")) == many + 1
    assert pickle.loads(pickle.dumps(handle)).metrics()["service/cache_hits"] == 1


def test_a_wrong_reward_or_option_is_an_error_of_one_line_at_the_start(made: Any) -> None:
    for wrong, options, said in (
        ("tests.rewards.graders:no_such", {}, "no_such"),
        (pid, {"max_concurency": 3}, "max_concurency: Extra inputs"),
    ):
        with pytest.raises(UserError, match=said) as error:
            made(wrong, **options)
        assert "\n" not in str(error.value)


def test_an_unreachable_reward_service_is_an_error_of_one_line_for_the_caller(made: Any) -> None:
    def down(request: Request) -> float:
        raise ConnectionError("refused")

    handle = made(down, attempts=1)
    with pytest.raises(UserError, match="refused") as error:
        handle.score_groups([[(TASK, f"{n}") for n in range(64)]])
    assert "\n" not in str(error.value)


def test_calls_of_a_dead_actor_raise_and_its_journal_serves_the_next_actor(made: Any, ray: Any, tmp_path: Path) -> None:
    file, journal = tmp_path / "asked", tmp_path / "journal.sqlite"
    first = made(Noted(str(file)), journal=journal)
    before = first.score_groups([[(TASK, "1"), (TASK, "2")]])
    waiting = first.actor.handle.remote("score_groups", ([[(TASK, "3"), (TASK, "hang")]], "train"))
    ray.kill(first.actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    for call in (
        lambda: first.score_groups([[(TASK, "1")]]),
        first.metrics,
        lambda: asyncio.run(first.score(TASK, "1")),
    ):
        with pytest.raises(UserError, match="the reward actor is dead") as error:
            call()
        assert "\n" not in str(error.value)
    first.close()

    second = made(Noted(str(file)), journal=journal)
    assert second.score_groups([[(TASK, "1"), (TASK, "2")]]) == before == [[Score(1.0), Score(2.0)]]
    assert second.metrics()["service/journal_hits"] == 2
    assert asked(file).count("1") == asked(file).count("2") == 1


def test_an_actor_restarted_by_ray_continues_with_its_journal(made: Any, ray: Any, tmp_path: Path) -> None:
    file, journal = tmp_path / "asked", tmp_path / "journal.sqlite"
    handle = made(
        Noted(str(file)), journal=journal, options={"max_restarts": 1, "max_task_retries": 1, "name": "judge"}
    )
    handle.score_groups([[(TASK, "1"), (TASK, "2")]])
    os.kill(ray.get(handle.actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    named = RewardHandle(ray.get_actor("judge"))
    assert named.score_groups([[(TASK, "2"), (TASK, "1"), (TASK, "3")]]) == [[Score(2.0), Score(1.0), Score(3.0)]]
    assert asked(file) == ["1", "2", "3"]


def test_the_ray_code_of_the_rewards_page_runs(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "howto" / "rewards.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "reward_actor" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    journal = str(tmp_path / "rewards.sqlite")
    scored = names["scored_by_a_cluster"]
    assert scored(Noted(str(tmp_path / "asked")), [[(TASK, "1")], [(TASK, "2")]]) == [[Score(1.0)], [Score(2.0)]]
    assert Path(journal).exists()


def test_a_missing_ray_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'gleanrl\[ray\]'"):
        reward_actor(pid)
