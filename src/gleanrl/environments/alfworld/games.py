"""Makes tasks from generated households and from ALFWorld's own game files, and returns the game of a task.

The payload of a task contains either the PDDL problem of a generated household, or the path of a game file in the
folder that the environment variable ALFWORLD_DATA names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

from gleanrl.environments.alfworld.engine import Game
from gleanrl.environments.alfworld.households import GOALS, Household
from gleanrl.types import Task
from gleanrl.utils.errors import UserError

FOLDERS = ("valid_unseen", "valid_seen", "train")
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"


def household_task(household: Household) -> Task:
    """Make the task of a generated household."""
    payload = {
        "problem": household.pddl(),
        "task": household.task(),
        "goal": household.goal,
        "room": household.room,
        "target": household.target.lower(),
        "destination": household.destination.lower(),
    }
    return generated_task(payload)


def generated_task(payload: dict[str, Any]) -> Task:
    """Make the task of this payload. Its id contains a hash of the PDDL problem and of the goal in words."""
    digest = hashlib.blake2b(f"{payload['problem']}\n{payload['task']}".encode(), digest_size=8).hexdigest()
    return Task(id=f"alfworld-{payload['goal']}-{digest}", payload=payload, kind=payload["goal"])


def game_of(task: Task) -> Game:
    """Return the game of ``task``, from a cache if it is there. Episodes of the same task can share a game.

    Raises:
        UserError: the task is not an alfworld task, or its game file is missing, damaged or outside ALFWORLD_DATA.
    """
    payload = task.payload
    if "file" in payload:
        file = Path(payload["file"])
        # The task may come from a client of an environment service. The client must not be able to read files outside
        # the folder. Symbolic links in the folder are followed, because the folder's owner made them.
        if file.is_absolute() or ".." in file.parts:
            raise UserError(f"a task names the file {payload['file']!r}, which is not in the folder of ALFWORLD_DATA")
        path = data_root() / file

        def read() -> Game:
            data = read_game(path)
            return Game(data["pddl_problem"], domain_text=data["pddl_domain"], grammar_text=data["grammar"])

        return _CACHE.get((str(path), ""), read)
    if "problem" not in payload or "task" not in payload:
        raise UserError(f"task {task.id!r} is not an alfworld task: its payload has neither a problem nor a file")
    problem, words = payload["problem"], payload["task"]
    return _CACHE.get((problem, words), lambda: Game(problem, words))


class GameCache:
    """A thread-safe cache that keeps the most recently used games.

    Its capacity is a total number of ground operators, because a game takes about a kilobyte of memory for each of its
    operators. The game used last is kept even if it exceeds the capacity alone.
    """

    def __init__(self, operators: int) -> None:
        self._room = operators
        self._games: OrderedDict[tuple[str, str], Game] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[str, str], make: Callable[[], Game]) -> Game:
        with self._lock:
            game = self._games.pop(key, None)
            if game is None:
                game = make()
                self._room -= game.operators
            self._games[key] = game
            while self._room < 0 and len(self._games) > 1:
                self._room += self._games.popitem(last=False)[1].operators
            return game


_CACHE = GameCache(operators=200_000)


def read_game(path: Path) -> dict[str, Any]:
    """Read a ``game.tw-pddl`` file: JSON with the keys pddl_domain, pddl_problem, grammar and solvable.

    Raises `UserError` if the file cannot be read or lacks one of the first three keys.
    """
    data = _read_json(path, "ALFWorld game")
    missing = [key for key in ("pddl_domain", "pddl_problem", "grammar") if key not in data]
    if missing:
        raise UserError(f"{path} is not an ALFWorld game: it has no {', '.join(missing)}")
    return data


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not an {what}: not JSON ({error})") from None


def data_root() -> Path:
    """Return the folder that the environment variable ALFWORLD_DATA names. Raises `UserError` if there is none."""
    value = os.environ.get("ALFWORLD_DATA", "")
    if not value or not Path(value).is_dir():
        state = f"{value} is not a folder" if value else "it is not set"
        raise UserError(
            f"source alfworld_data needs the environment variable ALFWORLD_DATA, and {state}; "
            "set it to the folder of the downloaded games, or use source generated"
        )
    return Path(value)


def real_tasks(folder: str, goals: tuple[str, ...], *, last_first: bool = False) -> Iterator[Task]:
    """Yield the tasks of ALFWorld's own games in ``folder`` (valid_unseen, valid_seen or train) that have one of
    ``goals``.

    Only games that alfworld's own loader would play are used. Games with movable receptacles or slicing, games that are
    not marked as solvable, and folders without a trajectory or a game are left out. If a problem is in several folders,
    only the first of valid_unseen, valid_seen and train yields it.

    The order is random but fixed, so that the first games include all kinds of goals. ``last_first`` reverses it.

    Raises:
        UserError: ALFWORLD_DATA or the folder is missing, or a file in it cannot be read.
    """
    root = data_root()
    base = next((b for b in (root, *sorted(root.glob("json_*"))) if (b / folder).is_dir()), None)
    if base is None:
        raise UserError(f"{root} has no folder {folder} (looked there and in json_*); check ALFWORLD_DATA")
    taken = {_digest(p) for other in FOLDERS[: FOLDERS.index(folder)] for p in _game_files(base / other)}
    names = {GOALS[goal].library: goal for goal in goals}
    files = _game_files(base / folder)
    for path in reversed(files) if last_first else files:
        trajectory = _read_json(path.with_name(TRAJECTORY), "ALFWorld trajectory")
        goal = names.get(trajectory.get("task_type", ""))
        if goal is None or not read_game(path).get("solvable", False):
            continue
        digest = _digest(path)
        if digest not in taken:
            taken.add(digest)
            payload = {"file": path.relative_to(root).as_posix(), "goal": goal}
            parameters = trajectory.get("pddl_params", {})
            target = parameters.get("object_target", "")
            place = parameters.get("parent_target", "") or parameters.get("toggle_target", "")
            # The goal's text, which a person has written, may not name target and destination. The expert needs them.
            if target and place:
                payload |= {"target": target.lower(), "destination": place.lower()}
            yield Task(id=f"alfworld-{goal}-{digest}", payload=payload, kind=goal)


def _game_files(folder: Path) -> list[Path]:
    """Return the playable games below ``folder``, in a fixed order that does not depend on their goals.

    They are sorted by a hash, because the names of their folders begin with the kind of goal.
    """
    games = []
    for trajectory in folder.rglob(TRAJECTORY):
        path = trajectory.with_name(GAME)
        parts = path.parent.relative_to(folder).parts
        if path.exists() and not any("movable" in part or "Sliced" in part for part in parts):
            games.append(path)
    return sorted(games, key=lambda path: hashlib.blake2b(path.relative_to(folder).as_posix().encode()).digest())


def _digest(path: Path) -> str:
    data = read_game(path)
    return hashlib.blake2b(f"{data['pddl_problem']}\n{data['grammar']}".encode(), digest_size=8).hexdigest()
