"""Generates TextWorld games and compiles them.

A `Recipe` and a seed determine a game. Its compiled file is cached on disk, so that each game is compiled once.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gleanrl.environments.splits import fingerprint
from gleanrl.utils import atomic
from gleanrl.utils.cache import cache_dir
from gleanrl.utils.errors import UserError

_VERSION = 1  # version of `_make_coin_collector`; increase it after a change that makes other games from the same seeds


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parameters from which games are generated.

    ``quest_length`` is the length of the shortest list of commands that wins a quest. With ``goal="detailed"`` the
    objective of a game describes every step, with "brief" only the last one.
    """

    game: Literal["coin_collector", "custom"]
    rooms: int
    objects: int
    quest_length: int
    quests: int
    goal: Literal["detailed", "brief"]
    theme: Literal["house", "basic"]

    @property
    def key(self) -> str:
        """Name of the cache folder of the recipe's games. It depends on the recipe and on the version of textworld."""
        import textworld

        text = json.dumps([asdict(self), textworld.__version__, _VERSION], sort_keys=True)
        return f"{self.game}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def compiled(recipe: Recipe, seed: int, mark: str) -> Path:
    """Return the path of a game's playable ``.z8`` file. The game's ``.json`` description is next to it.

    The game is generated and compiled if the file does not exist. ``mark`` is the fingerprint (`content`) that it must
    have.

    Raises:
        UserError: the generated game has another fingerprint, because the installed version of textworld generates
            other games, or it cannot be generated or compiled.
    """
    file = _file(recipe, seed, mark)
    if not file.exists():
        _compile(recipe, seed, mark, make(recipe, seed))
    return file


def prepare(
    games: Sequence[tuple[Recipe, int, str]], workers: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile those of ``games`` that are not on disk, ``workers`` at a time.

    A game is a tuple (recipe, seed, mark), as in `compiled`. Calls ``progress(done, total)`` after each game.
    """
    missing = [game for game in games if not _file(*game).exists()]
    done = len(games) - len(missing)
    # Generating games is not thread-safe, so only this thread does it. The other threads run the compiler, which
    # consists of two external programs.
    with ThreadPoolExecutor(max(1, workers)) as threads:
        running = [threads.submit(_compile, *game, make(game[0], game[1])) for game in missing]
        for future in as_completed(running):
            future.result()
            done += 1
            if progress:
                progress(done, len(games))


class Contents:
    """Maps each seed to the content fingerprint (`content`) of the game that the recipe makes from it.

    `save` stores the fingerprints on disk, because choosing the tasks of a split takes many of them, and computing one
    requires generating the game.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._file = cache_dir("textworld") / recipe.key / "contents.json"
        self._saved = self._read()
        self._new: dict[str, str] = {}

    def __getitem__(self, seed: int) -> str:
        key = str(seed)
        if key not in self._saved and key not in self._new:
            self._new[key] = content(make(self._recipe, seed))
        return self._saved.get(key) or self._new[key]

    def save(self) -> None:
        if self._new:
            # Read the file again, because another process may have added fingerprints to it.
            atomic.write_text(self._file, json.dumps({**self._read(), **self._new}))

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self._file.read_bytes())
        # If the file does not exist or is damaged, the fingerprints are computed again when they are needed.
        except (OSError, ValueError):
            return {}


def make(recipe: Recipe, seed: int) -> Any:
    """Generate the `textworld.Game` of a recipe and a seed, which is the same in every process.

    Raises:
        UserError: textworld cannot make a game from this recipe.
    """
    import textworld
    from textworld.generator import QuestGenerationError, make_game

    options = textworld.GameOptions()
    options.seeds = seed
    options.nb_rooms = recipe.rooms
    options.nb_objects = recipe.objects
    options.nb_parallel_quests = recipe.quests
    options.quest_length = recipe.quest_length
    options.grammar.theme = recipe.theme
    options.grammar.only_last_action = recipe.goal == "brief"
    try:
        if recipe.game == "coin_collector":
            return _make_coin_collector(options)
        options.kb = _knowledge(None)
        return make_game(options)
    except (ValueError, QuestGenerationError) as error:
        raise UserError(f"environment.options: textworld cannot make such a game ({recipe}): {error}") from error


def content(game: Any) -> str:
    """Return the `fingerprint` of a game: of the facts of its world, the names of its objects, and the goals of its
    quests.

    Descriptions do not affect it, so two games that differ only in wording have the same fingerprint.
    """

    def read(proposition: Any) -> str:
        names = (game.infos[v.name].name or v.name if v.name in game.infos else v.name for v in proposition.arguments)
        return f"{proposition.name}({', '.join(names)})"

    facts = sorted(map(read, game.world.facts))
    events = [event for quest in game.quests for event in quest.win_events]
    goals = sorted(read(condition) for event in events for condition in event.condition.preconditions)
    return fingerprint("world", *facts, "goals", *goals)


def _make_coin_collector(options: Any) -> Any:
    """Make a game with a chain of rooms from the player to a coin, and further rooms off the way.

    TextWorld's own function for this kind of game compiles each game to find the actions that win it. This function
    finds them in the game's logic, which takes milliseconds.
    """
    import textworld
    from textworld.challenges.tw_coin_collector import coin_collector
    from textworld.generator.game import Event, GameProgression, Quest
    from textworld.generator.inform7 import Inform7Game

    options.kb = _knowledge(coin_collector.KB_PATH)
    options.grammar.allowed_variables_numbering = True  # because there may be more rooms than room names
    rng = options.rngs["map"]
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    maker: Any = textworld.GameMaker(options)
    rooms = [maker.new_room()]
    commands: list[str] = []

    def free_ways(room: Any) -> list[str]:
        return sorted(way for way, door in room.exits.items() if door.dest is None)

    while len(rooms) < options.nb_rooms:
        # The path to the object has quest_length rooms: walking it takes quest_length - 1 "go" commands and one "take".
        on_the_way = len(rooms) < options.quest_length
        near = rooms[-1]
        if not on_the_way:
            open_rooms = [room for room in rooms if free_ways(room)]
            near = open_rooms[rng.randint(len(open_rooms))]
        ways = free_ways(near)
        way = ways[rng.randint(len(ways))]
        room = maker.new_room()
        maker.connect(near.exits[way], room.exits[opposite[way]])
        rooms.append(room)
        if on_the_way:
            commands.append(f"go {way}")
    commands.append("take coin")
    maker.set_player(rooms[0])
    coin = maker.new(type="o", name="coin")
    rooms[options.quest_length - 1].add(coin)

    game = maker.build()
    words, progression = Inform7Game(game), GameProgression(game, track_quests=False)
    actions = []  # the logical action of each command, found by playing the commands from the start
    for command in commands:
        valid = progression.valid_actions
        actions.append(valid[words.gen_commands_from_actions(valid).index(command)])
        progression.update(actions[-1])
    won = Event(actions=actions, conditions={maker.new_fact("in", coin, maker.inventory)}, commands=commands)
    maker.quests = [Quest(win_events=[won])]
    return maker.build()


@lru_cache(maxsize=2)
def _knowledge(path: str | None) -> Any:
    """Load a knowledge base. Cached, because parsing takes half a second and generating games does not change it."""
    from textworld.generator.data import KnowledgeBase

    return KnowledgeBase.load(path) if path else KnowledgeBase.load()


def _file(recipe: Recipe, seed: int, mark: str) -> Path:
    return cache_dir("textworld") / recipe.key / f"{mark[:16]}-{seed}.z8"


def _compile(recipe: Recipe, seed: int, mark: str, game: Any) -> None:
    import textworld
    from textworld.generator import CouldNotCompileGameError, compile_game

    if content(game) != mark:
        raise UserError(
            f"textworld {textworld.__version__} makes another game of seed {seed} than the task says; "
            "play it with the version that it was made with"
        )
    file = _file(recipe, seed, mark)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        options = textworld.GameOptions()
        options.path = str(Path(folder) / file.name)
        try:
            made = Path(compile_game(game, options))
        except (OSError, CouldNotCompileGameError) as error:
            raise UserError(f"textworld could not compile a game in {folder}: {error}") from error
        # The .json file comes first, because a process that finds the .z8 file expects both.
        os.replace(made.with_suffix(".json"), file.with_suffix(".json"))
        os.replace(made, file)
