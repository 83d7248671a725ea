"""Games behind tasks: generated households carry their PDDL, real ones name a file under ALFWORLD_DATA."""

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
from gleanrl.errors import UserError
from gleanrl.protocols import Split
from gleanrl.types import Task

FOLDERS: dict[Split, str] = {"train": "train", "eval": "valid_unseen", "warm_start": "valid_seen"}


def household_task(household: Household) -> Task:
    """The task of a generated household; its id is a hash of the problem and its wording."""
    payload = {
        "problem": household.pddl(),
        "task": household.task(),
        "goal": household.goal,
        "room": household.room,
        "target": household.target.lower(),
        "destination": household.destination.lower(),
    }
    digest = hashlib.blake2b(f"{payload['problem']}\n{payload['task']}".encode(), digest_size=8).hexdigest()
    return Task(id=f"alfworld-{household.goal}-{digest}", payload=payload)


def game_of(task: Task) -> Game:
    """The game of a task; episodes of one task share one game while it is among the last used."""
    payload = task.payload
    if "file" in payload:
        path = str(data_root() / payload["file"])
        return _CACHE.get((path, ""), lambda: _from_file(path))
    if "problem" not in payload or "task" not in payload:
        raise UserError(f"task {task.id!r} is not an alfworld task: its payload has neither a problem nor a file")
    problem, words = payload["problem"], payload["task"]
    return _CACHE.get((problem, words), lambda: Game(problem, words))


class _Cache:
    """The games last used, as many as a number of ground operators allows; each takes about a kilobyte."""

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


_CACHE = _Cache(operators=200_000)


def _from_file(path: str) -> Game:
    data = read_game(Path(path))
    return Game(data["pddl_problem"], domain_text=data["pddl_domain"], grammar_text=data["grammar"])


def read_game(path: Path) -> dict[str, Any]:
    """A ``game.tw-pddl`` file: JSON with the keys pddl_domain, pddl_problem, grammar and mostly solvable."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the ALFWorld game {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not an ALFWorld game: not JSON ({error})") from None
    missing = [key for key in ("pddl_domain", "pddl_problem", "grammar") if key not in data]
    if missing:
        raise UserError(f"{path} is not an ALFWorld game: it has no {', '.join(missing)}")
    return data


def data_root() -> Path:
    """The folder that ALFWORLD_DATA names."""
    value = os.environ.get("ALFWORLD_DATA", "")
    if not value or not Path(value).is_dir():
        state = f"{value} is not a folder" if value else "it is not set"
        raise UserError(
            f"source alfworld_data needs the environment variable ALFWORLD_DATA, and {state}; "
            "set it to the folder of the downloaded games, or use source generated"
        )
    return Path(value)


def real_tasks(split: Split, goals: tuple[str, ...]) -> Iterator[Task]:
    """Solvable games of ALFWORLD_DATA whose goal is of one of the kinds, in the order of their paths.

    train comes from ``train``, eval from ``valid_unseen`` and warm_start from ``valid_seen``; a problem
    that stands in several folders belongs to the first of eval, warm_start, train.
    """
    root = data_root()
    base = next((b for b in (root, *sorted(root.glob("json_*"))) if (b / FOLDERS[split]).is_dir()), None)
    if base is None:
        raise UserError(f"{root} has no folder {FOLDERS[split]} (looked there and in json_*); check ALFWORLD_DATA")
    order: tuple[Split, ...] = ("eval", "warm_start", "train")
    taken = {_digest(path) for other in order[: order.index(split)] for path in _game_files(base / FOLDERS[other])}
    names = {GOALS[goal].library: goal for goal in goals}
    for path in _game_files(base / FOLDERS[split]):
        library = path.parent.parent.name.split("-", 1)[0]
        digest = _digest(path)
        if library in names and digest not in taken and read_game(path).get("solvable", True):
            taken.add(digest)
            relative = path.relative_to(root).as_posix()
            yield Task(id=f"alfworld-{names[library]}-{digest}", payload={"file": relative, "goal": names[library]})


def _game_files(folder: Path) -> list[Path]:
    """Games that the text engine plays: those with movable receptacles or slicing are left out, as alfworld does."""
    found = folder.glob("*/*/game.tw-pddl")
    return sorted(p for p in found if "movable" not in p.parts[-3] and "Sliced" not in p.parts[-3])


def _digest(path: Path) -> str:
    data = read_game(path)
    return hashlib.blake2b(f"{data['pddl_problem']}\n{data['grammar']}".encode(), digest_size=8).hexdigest()
