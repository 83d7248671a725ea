"""`TextworldTaskset`: comparison with TextWorld's own engine, episodes, splits, demonstrations and commands.

The games are compiled once for this file, in a cache folder of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gleanrl.environments import splits
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.textworld import engine as engine
from gleanrl.environments.textworld.games import compiled, content, make
from gleanrl.environments.textworld.taskset import TextworldTaskset, command_of
from gleanrl.protocols import Observation, Split, Taskset
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from tests.strategies import NIGHTLY

textworld = pytest.importorskip("textworld")
# TextWorld's own engine warns about each game.
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")
COINS = TextworldTaskset(rooms=6, quest_length=3, seed=1)
QUESTS = TextworldTaskset(game="custom", rooms=3, objects=6, quest_length=3, quests=2, goal="detailed", seed=1)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache folder of this module's own, in which every game is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLEANRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def first(taskset: TextworldTaskset) -> Task:
    return taskset.tasks("train", 1)[0]


def played(taskset: Taskset, task: Task, texts: list[str], workers: int = 0) -> list[Observation]:
    async def run() -> list[Observation]:
        async with EnvironmentPool(taskset, workers=workers) as pool:
            environment = pool.environment(task)
            seen = [await environment.reset()]
            seen += [await environment.step({"role": "assistant", "content": text}) for text in texts]
            await environment.close()
            return seen

    return asyncio.run(run())


def stock(file: Path) -> Any:
    infos = textworld.EnvInfos(admissible_commands=True, policy_commands=True, score=True, won=True)
    return textworld.start(str(file), infos)


@pytest.mark.parametrize("taskset", [COINS, QUESTS], ids=["coin_collector", "custom"])
def test_every_state_equals_that_of_textworlds_own_engine(
    taskset: TextworldTaskset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares random walks of valid, impossible and meaningless commands, interleaved on one interpreter."""
    monkeypatch.setattr(engine, "_INTERPRETERS", 1)
    files = [compiled(*_game(task)) for task in taskset.tasks("train", 2)]
    draw = random.Random(0)
    # Each walk holds TextWorld's own engine, its state, and the state of Glean RL's engine.
    walks = [[stock(files[i % 2]), None, None] for i in range(4)]
    compared = 0
    for walk, file in zip(walks, files * 2, strict=True):
        walk[1], walk[2] = walk[0].reset(), engine.load(file).root
    while compared < (250 if NIGHTLY else 120):
        walk = draw.choice(walks)
        reference, state = walk[1], walk[2]
        assert engine.readable(reference.feedback) == state.text
        assert (reference.score, bool(reference.won)) == (state.score, state.won)
        compared += 1
        if state.over:
            walk[1], walk[2] = walk[0].reset(), state.game.root
            continue
        assert reference.admissible_commands == state.admissible()
        assert list(reference.policy_commands) == state.policy()
        valid, policy = reference.admissible_commands, reference.policy_commands
        choices = [draw.choice(valid), draw.choice(valid), policy[0], "go up", "take the moon", "dance"]
        command = draw.choice(choices)
        walk[1], walk[2] = walk[0].step(command)[0], state.step(command)
    for environment, *_ in walks:
        environment.close()


def test_a_command_that_was_played_before_is_answered_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    task = first(COINS)
    commands = [m["content"] for m in COINS.demonstrate(task, seed=0)[0] if m["role"] == "assistant"]
    before = engine.load(compiled(*_game(task))).states
    monkeypatch.setattr(engine.Game, "play", lambda *_: pytest.fail("played again"))
    assert played(COINS, task, commands)[-1].done
    assert engine.load(compiled(*_game(task))).states == before


def test_episodes_of_a_game_that_the_cache_evicted_can_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (compiled(*_game(task)) for task in COINS.tasks("train", 2))
    state = engine.load(one).root.step("look")
    monkeypatch.setattr(engine, "_STATES", 0)
    engine.load(two).root.step("look")
    fresh = engine.load(one)
    assert fresh is not state.game
    assert fresh.root.step("inventory").text == state.step("inventory").text == "You are carrying nothing."
    assert fresh.root.step("look").step("examine me").text == state.step("examine me").text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taskset", [COINS, QUESTS], ids=["coin_collector", "custom"])
def test_replaying_a_demonstration_gives_the_same_observations_and_wins(
    taskset: TextworldTaskset, workers: int
) -> None:
    assert taskset.has_expert
    task = first(taskset)
    conversation, score = taskset.demonstrate(task, seed=0)
    assert (score.value, score.parts["points"]) == (1.0, 1.0)
    commands = [m["content"] for m in conversation if m["role"] == "assistant"]
    seen = played(taskset, task, commands, workers)
    assert [o.messages[0] for o in seen[:-1]] == [m for m in conversation if m["role"] == "user"]
    assert [o.done for o in seen] == [False] * (len(seen) - 1) + [True]
    assert [o.score.value if o.score else None for o in seen] == [0.0] * (len(seen) - 1) + [1.0]
    assert "*** The End ***" in seen[-1].messages[0]["content"]
    assert taskset.game == "custom" or len(commands) == taskset.quest_length


def test_noise_lengthens_demonstrations_reproducibly() -> None:
    task = first(COINS)
    lengths = set()
    for seed in range(8):
        conversation, score = COINS.demonstrate(task, seed=seed, noise=0.5)
        assert (conversation, score) == COINS.demonstrate(task, seed=seed, noise=0.5)
        assert score.value == 1.0
        lengths.add(sum(m["role"] == "assistant" for m in conversation))
    assert len(lengths) > 1
    assert min(lengths) >= COINS.quest_length


def test_an_expert_that_cannot_win_from_the_start_shows_the_opening_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    task = first(COINS)
    [opening] = played(COINS, task, [])
    monkeypatch.setattr(engine.State, "policy", lambda _: [])
    conversation, score = COINS.demonstrate(task, seed=0)
    assert conversation == opening.messages
    assert (score.valid, score.value) == (True, 0.0)


def test_an_expert_stops_once_the_game_can_no_longer_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    task = first(COINS)
    whole, _ = COINS.demonstrate(task, seed=0)
    wins = engine.State.policy
    monkeypatch.setattr(engine.State, "policy", lambda state: [] if state.parent else wins(state))
    conversation, score = COINS.demonstrate(task, seed=0)
    assert conversation == whole[:2]
    assert score.value == 0.0


def test_goal_and_admissible_commands_are_shown_according_to_the_options() -> None:
    def opening(**options: Any) -> str:
        taskset = TextworldTaskset(rooms=6, quest_length=3, seed=1, **options)
        return played(taskset, first(taskset), [])[0].messages[0]["content"]

    brief, silent = opening(), opening(goal="none", admissible_commands=False)
    assert "coin" in brief.splitlines()[0]
    assert "You can: " in brief.splitlines()[-1]
    assert silent.startswith("-= ")
    assert "You can" not in silent
    assert silent in brief
    assert len(opening(goal="detailed").splitlines()[0]) > len(brief.splitlines()[0])


@pytest.mark.parametrize("shown", [True, False], ids=["commands shown", "commands not shown"])
def test_two_observations_have_the_same_state_if_and_only_if_the_game_has_the_same_facts(shown: bool) -> None:
    """Turn-level credit compares the messages that were sampled in the same state, whatever led there."""
    taskset = TextworldTaskset(rooms=6, quest_length=3, seed=1, admissible_commands=shown)
    task = first(taskset)
    game = engine.load(compiled(*_game(task)))
    there = next(command for command in game.root.admissible() if command.startswith("go "))
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[there.removeprefix("go ")]
    texts = ["look", "xyzzy", "", there, f"go {back}"]
    start, looked, unknown, nothing, moved, returned = played(taskset, task, texts)
    assert start.state == looked.state == unknown.state == nothing.state == returned.state
    assert start.state is not None
    assert moved.state != start.state
    assert start.messages != unknown.messages
    elsewhere = played(taskset, task, texts, workers=1)  # in another process, whose hashes of texts are others
    assert [seen.state for seen in elsewhere] == [start.state] * 4 + [moved.state, start.state]


def test_states_with_the_same_key_have_the_same_future() -> None:
    """Plays up to three commands, which also undo what quests asked for, and then each command in states of one key."""
    task = TextworldTaskset(game="custom", rooms=3, objects=8, quests=2, quest_length=2).tasks("train", 3)[2]
    game = engine.load(compiled(*_game(task)))
    reached: dict[str, list[engine.State]] = {game.root.key(): [game.root]}
    edge = [game.root]
    for _ in range(3):
        edge = [state.step(command) for state in edge if not state.over for command in state.admissible()]
        for state in edge:
            reached.setdefault(state.key(), []).append(state)
        edge = [state for state in edge if state in reached[state.key()][:3]]
    compared = 0
    for state, *others in reached.values():
        for other in others[:2]:
            for command in state.admissible():
                ours, theirs = state.step(command), other.step(command)
                assert (ours.key(), ours.won, ours.over) == (theirs.key(), theirs.won, theirs.over)
                assert ours.score - state.score == theirs.score - other.score
                compared += 1
    assert compared > 100
    assert len({game.world_of(found[0]).facts for found in reached.values()}) < len(reached)


def test_commands_to_the_interpreter_and_second_commands_are_not_played() -> None:
    task = first(COINS)
    texts = ["quit", "Restart", "tw-print state", "undo", "", "look. quit", "<think>go north</think>\nlook\ngo north"]
    seen = played(COINS, task, texts)
    start = seen[0].messages[0]["content"].partition("\n")[2]
    answers = [o.messages[0]["content"] for o in seen[1:]]
    assert answers[:4] == ["That's not a verb you recognise."] * 4
    assert answers[4] == "I beg your pardon?"
    # Only the first command, "look", was played.
    assert answers[5] == answers[6] == start
    assert not any(o.done for o in seen)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("  Go   North ", "go north"),
        ("open safe\nthen this", "open safe"),
        ("take coin then go east", "take coin"),
        ("take coin. go east", "take coin"),
        ("<think>hm\nhm</think> look", "look"),
        ("naïve café", "nave caf"),
        # With the backslash, the interpreter would prompt for input for ever.
        (r"\\go west\\", "go west"),
        ("x" * 500, "x" * 120),
        ("", ""),
    ],
)
def test_command_of_takes_one_plain_command_from_a_message(text: str, command: str) -> None:
    assert command_of(text) == command


def test_splits_share_no_game_and_task_ids_do_not_depend_on_the_process() -> None:
    def ids(seed: int) -> dict[Split, list[str]]:
        taskset = TextworldTaskset(rooms=5, quest_length=3, seed=seed)
        return {split: [t.id for t in taskset.tasks(split, 4)] for split in SPLITS}

    one, two = ids(1), ids(2)
    for split in SPLITS:
        assert len(set(one[split])) == 4
        for other in SPLITS:
            if other != split:
                assert not set(one[split]) & {*one[other], *two[other]}
    code = (
        "from gleanrl.environments.textworld.taskset import *; import json;"
        "print(json.dumps([t.id for t in TextworldTaskset(rooms=5, quest_length=3, seed=1).tasks('train', 4)]))"
    )
    # TextWorld iterates over sets, whose order depends on the hash seed, so that the other process has another one.
    elsewhere = {"PYTHONHASHSEED": "1", "GLEANRL_CACHE": str(compiled(*_game(first(COINS))).parent / "elsewhere")}
    answer = subprocess.run([sys.executable, "-c", code], env=elsewhere, capture_output=True, text=True)
    assert json.loads(answer.stdout) == one["train"]


def test_a_task_from_json_plays_the_same_game() -> None:
    task = first(COINS)
    again = Task(task.id, payload=json.loads(json.dumps(dict(task.payload))))
    assert played(COINS, again, ["look"]) == played(COINS, task, ["look"])


def test_the_payload_has_the_display_options_only_if_they_are_not_the_defaults() -> None:
    options: list[dict[str, Any]] = [{}, {"goal": "none"}]
    usual, silent = (first(TextworldTaskset(rooms=6, quest_length=3, seed=1, **given)) for given in options)
    plain = first(TextworldTaskset(rooms=6, quest_length=3, seed=1, admissible_commands=False))
    assert usual.id == silent.id == plain.id
    assert usual.payload.keys() == {"recipe", "seed", "content"}
    assert (silent.payload["shown"], plain.payload["shown"]) == ({"goal": "none"}, {"admissible_commands": False})


def test_a_task_whose_game_this_textworld_makes_differently_raises() -> None:
    recipe, seed, _ = _game(first(COINS))
    other = content(make(recipe, seed + 1))
    task = Task("t", payload={"recipe": asdict(recipe), "seed": seed, "content": other})
    with pytest.raises(UserError, match="makes another game of seed"):
        played(COINS, task, [])


def test_prepare_compiles_games_in_parallel_and_keeps_them() -> None:
    tasks = COINS.tasks("warm_start", 3)
    named: list[tuple[int, int]] = []
    COINS.prepare(tasks, workers=2, progress=lambda done, total: named.append((done, total)))
    assert named == [(1, 3), (2, 3), (3, 3)]
    named.clear()
    COINS.prepare(tasks, workers=2, progress=lambda done, total: named.append((done, total)))
    # All games are in the cache, so that there is no progress to report.
    assert named == []
    folder = compiled(*_game(tasks[0])).parent
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".z8", ".json"}


def test_asking_for_more_games_than_exist_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_PATIENCE", 60)
    with pytest.raises(UserError, match="different problems for 'eval', of 50 asked for"):
        TextworldTaskset(rooms=1, quest_length=1, theme="basic").tasks("eval", 50)


def _game(task: Task) -> Any:
    from gleanrl.environments.textworld.taskset import _game_of

    return _game_of(task)
