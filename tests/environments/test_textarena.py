"""`TextarenaTaskset` with TextArena's games: single-player games, opponents, seats, scores and errors."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.adapters.textarena import Game, TextarenaTaskset, choose_listed_move
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Observation, Split
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.rewards.service import Plan, Service

pytest.importorskip("textarena")

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")


class Echo:
    """A user-defined opponent that plays one of the listed moves and records the observations in ``heard``."""

    heard: list[str] = []  # noqa: RUF012

    def __init__(self, prefix: str, *, seed: int) -> None:
        self.prefix, self.seed = prefix, seed

    async def __call__(self, observation: str) -> str:
        await asyncio.sleep(0)
        self.heard.append(observation)
        return self.prefix + choose_listed_move(observation, random.Random(self.seed))


def say_move(observation: str, *, move: str) -> str:
    return move


def loaded(env_id: Any = "GuessTheNumber-v0", **options: Any) -> TextarenaTaskset:
    taskset = load_taskset(EnvironmentSettings(name="textarena", options={"env_id": env_id, **options}), seed=5)
    assert isinstance(taskset, TextarenaTaskset)
    return taskset


def played(taskset: TextarenaTaskset, task: Task, moves: list[str], workers: int = 0) -> list[Observation]:
    """Play the moves until the episode is done, and return the observations."""

    async def main() -> list[Observation]:
        async with EnvironmentPool(taskset, workers=workers) as pool:
            environment = pool.environment(task)
            seen = [await environment.reset()]
            for move in moves:
                if seen[-1].done:
                    break
                seen.append(await environment.step({"role": "assistant", "content": move}))
            await environment.close()
            return seen

    return asyncio.run(main())


def moves_of(taskset: TextarenaTaskset, task: Task, **options: Any) -> list[str]:
    conversation, _ = taskset.demonstrate(task, seed=0, **options)
    return [message["content"] for message in conversation if message["role"] == "assistant"]


def score_of(seen: list[Observation]) -> Score:
    assert seen[-1].score is not None
    return seen[-1].score


def test_tasks_are_deterministic_and_no_game_is_in_two_splits() -> None:
    taskset = loaded(["GuessTheNumber-v0", "Nim-v0"])
    tasks = {split: taskset.tasks(split, 20) for split in SPLITS}
    assert {split: len({task.id for task in found}) for split, found in tasks.items()} == dict.fromkeys(SPLITS, 20)
    assert len({(t.payload["env_id"], t.payload["seed"]) for found in tasks.values() for t in found}) == 60
    assert {task.payload["env_id"] for task in tasks["train"]} == {"GuessTheNumber-v0", "Nim-v0"}
    assert list(taskset.tasks("train", 50)[:20]) == tasks["train"]
    assert loaded(["GuessTheNumber-v0", "Nim-v0"]).tasks("train", 20) == tasks["train"]
    assert json.loads(json.dumps(tasks["train"][0].payload)) == tasks["train"][0].payload
    assert loaded(arguments={"max_number": 50}).tasks("train", 1)[0].id != loaded().tasks("train", 1)[0].id


def test_tasks_with_other_options_have_other_ids_but_the_same_seeds_and_split() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"opponent": "expert"},
        {"opponent": ["[1 1]"]},
        {"seat": 0},
        {"seat": 1},
        {"reward_range": (0.0, 1.0)},
        {"unfinished": 0.5},
        {"observation": "textarena"},
    ]
    for split in SPLITS:
        found = [loaded("Nim-v0", **given).tasks(split, 12) for given in options]
        problems = {task.id: json.dumps(task.payload, sort_keys=True) for tasks in found for task in tasks}
        assert len(set(problems.values())) == len(problems)
        for tasks in found:
            assert all(problems[task.id] == json.dumps(task.payload, sort_keys=True) for task in tasks)
            assert [task.payload["seed"] for task in tasks] == [task.payload["seed"] for task in found[0]]
    plain, seated = loaded("Nim-v0").tasks("train", 12), loaded("Nim-v0", seat=0).tasks("train", 12)
    same = [one.id == other.id for one, other in zip(plain, seated, strict=True)]
    assert same == [task.payload["seat"] == 0 for task in plain]
    assert len(set(same)) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_the_expert_of_guess_the_number_wins_in_at_most_five_moves(workers: int) -> None:
    taskset = loaded()
    assert taskset.has_expert
    for task in taskset.tasks("train", 1 if workers else 8):
        moves = moves_of(taskset, task)
        # Bisection finds one of 20 numbers in at most five moves.
        assert len(moves) <= 5
        seen = played(taskset, task, moves, workers)
        assert seen[-1].done
        assert score_of(seen).value == 1.0
        assert score_of(seen).parts == {"won": 1.0, "reward": 1.0, "moves": float(len(moves)), "invalid_moves": 0.0}
        # The observations do not repeat the player's own moves.
        assert all(not any(move in s.messages[0]["content"] for move in moves) for s in seen[1:])


def test_a_move_inside_an_unclosed_think_tag_is_not_played() -> None:
    taskset = loaded()
    task = taskset.tasks("train", 1)[0]
    (move, *_) = moves_of(taskset, task)
    invalid = [played(taskset, task, [said])[-1].score for said in (f"<think>{move}", f"<think>no</think>{move}")]
    assert [score.parts["invalid_moves"] for score in invalid if score is not None] == [1.0, 0.0]


@pytest.mark.parametrize("env_id", ["TowerOfHanoi-v0", "Mastermind-v0", "Nim-v0", "TicTacToe-v0", "GuessTheNumber-v0"])
def test_experts_beat_random_players(env_id: str) -> None:
    taskset = loaded(env_id)
    tasks = taskset.tasks("train", 10)
    best = [taskset.demonstrate(task, seed=i)[1].value for i, task in enumerate(tasks)]
    stray = [taskset.demonstrate(task, seed=i, noise=1.0)[1].value for i, task in enumerate(tasks)]
    assert sum(best) > sum(stray)
    assert sum(best) >= 8.0
    if env_id == "TicTacToe-v0":
        # The expert never loses, and against itself it never wins.
        assert min(best) >= 0.0
        against = loaded(env_id, opponent="expert")
        scores = {against.demonstrate(task, seed=i)[1].value for i, task in enumerate(against.tasks("train", 4))}
        assert scores == {0.0}


def test_an_invalid_move_is_answered_and_a_second_one_ends_the_game() -> None:
    taskset = loaded(reward_range=[0.0, 2.0])
    task = taskset.tasks("train", 1)[0]
    seen = played(taskset, task, ["no idea", "what?"])
    assert "You attempted an invalid move. Reason: Invalid move format." in seen[1].messages[0]["content"]
    assert (seen[1].done, seen[2].done) == (False, True)
    assert score_of(seen).parts == {"won": 0.0, "reward": 0.0, "moves": 2.0, "invalid_moves": 2.0}
    # `reward_range` maps the game's reward of 0 from [-1, 1] to [0, 2].
    assert score_of(seen).value == 1.0
    with pytest.raises(RuntimeError, match="no step after the end"):
        asyncio.run(_beyond(taskset, task))


async def _beyond(taskset: TextarenaTaskset, task: Task) -> None:
    environment = taskset.environment(task)
    await environment.reset()
    for move in ["no", "no", "no"]:
        await environment.step({"role": "assistant", "content": move})


def test_a_game_that_ends_with_an_invalid_move_keeps_a_partial_reward() -> None:
    taskset = loaded("Countdown-v0")
    seen = played(taskset, taskset.tasks("train", 1)[0], ["no", "no"])
    assert seen[-1].done
    assert score_of(seen).valid
    [progress] = re.findall(r"Current progress score: (\d\.\d+)", seen[0].messages[0]["content"])
    assert score_of(seen).parts["reward"] == pytest.approx(float(progress), abs=1e-3)
    assert score_of(seen).parts["reward"] > 0.0


def test_the_policy_plays_the_seat_of_the_task_against_the_opponent() -> None:
    taskset = loaded("TicTacToe-v0", opponent=["[0]", "[1]", "[2]"])
    tasks = taskset.tasks("train", 12)
    assert {task.payload["seat"] for task in tasks} == {0, 1}
    first = next(task for task in tasks if task.payload["seat"] == 0)
    second = next(task for task in tasks if task.payload["seat"] == 1)
    seen = played(taskset, first, ["[4]", "[8]", "[3]", "[6]"])
    assert "[Player 1] [0]" in seen[1].messages[0]["content"]
    # The opponent has completed the row of cells 0, 1 and 2.
    assert score_of(seen).parts["won"] == 0.0
    assert score_of(seen).value == -1.0
    taskset = loaded("TicTacToe-v0", opponent=["[0]", "[1]", "[8]"])
    seen = played(taskset, second, ["[4]", "[3]", "[5]"])
    assert "[Player 0] [0]" in seen[0].messages[0]["content"]
    assert (score_of(seen).value, score_of(seen).parts["won"]) == (1.0, 1.0)
    assert {t.payload["seat"] for t in loaded("TicTacToe-v0", seat=1).tasks("train", 9)} == {1}


def test_an_unfinished_game_against_an_opponent_scores_the_option_unfinished() -> None:
    for env_id, options, value in [
        ("Nim-v0", {}, -1.0),
        ("Nim-v0", {"unfinished": 0.5}, 0.5),
        ("GuessTheNumber-v0", {}, 0.0),
    ]:
        taskset = loaded(env_id, **options)
        [opening] = played(taskset, taskset.tasks("train", 1)[0], [])
        assert opening.score is not None
        assert (opening.done, opening.score.value, opening.score.valid) == (False, value, True)


def test_a_user_defined_opponent_may_be_a_class_or_a_function() -> None:
    here = "tests.environments.test_textarena"
    taskset = loaded("TicTacToe-v0", seat=0, opponent=f"{here}:Echo", opponent_options={"prefix": "I say "})
    Echo.heard.clear()
    seen = played(taskset, taskset.tasks("train", 1)[0], ["[4]"])
    assert "[Player 1] I say [" in seen[1].messages[0]["content"]
    assert "You are Player 1 in Tic Tac Toe" in Echo.heard[0]
    taskset = loaded("TicTacToe-v0", seat=0, opponent=f"{here}:say_move", opponent_options={"move": "[8]"})
    assert "[Player 1] [8]" in played(taskset, taskset.tasks("train", 1)[0], ["[4]"])[1].messages[0]["content"]


def test_a_model_behind_an_openai_endpoint_can_be_the_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYERS_KEY", "a-key-1234567")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def main() -> tuple[Observation, Service]:
        answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "<think>8?</think>[8]"}}]}
        async with Service(Plan(answer=lambda path, body: (200, answer), key="a-key-1234567")) as service:
            options = {"base_url": f"{service.url}/v1", "model": "rival", "api_key_env": "PLAYERS_KEY", "max_tokens": 9}
            taskset = loaded("TicTacToe-v0", seat=0, opponent="openai", opponent_options=options)
            environment = taskset.environment(taskset.tasks("train", 1)[0])
            await environment.reset()
            observation = await environment.step({"role": "assistant", "content": "[4]"})
            await environment.close()
            return observation, service

    observation, service = asyncio.run(main())
    assert "[Player 1] [8]" in observation.messages[0]["content"]
    assert (service.bodies[0]["model"], service.bodies[0]["max_tokens"]) == ("rival", 9)
    assert "You are Player 1 in Tic Tac Toe" in service.bodies[0]["messages"][-1]["content"]


def test_the_observation_is_the_latest_message_or_the_whole_text_of_textarena() -> None:
    news, whole = loaded(), loaded(observation="textarena")
    task = news.tasks("train", 1)[0]
    assert whole.tasks("train", 1)[0].payload["observation"] == "textarena"
    first, second = (played(taskset, task, ["[1]", "[2]"])[1].messages[0]["content"] for taskset in (news, whole))
    assert first == "The target number is higher."
    assert second.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert second.endswith("[Player] [1]\n[GAME] The target number is higher.")


def test_interleaved_games_equal_games_played_alone_and_keep_the_global_random_state() -> None:
    taskset = loaded("2048-v0-mega-easy")
    tasks = taskset.tasks("train", 3)
    moves = ["[up]", "[left]", "[down]", "[right]"] * 5
    alone = [[s.messages[0]["content"] for s in played(taskset, task, moves)] for task in tasks]

    async def together() -> list[list[str]]:
        games = [taskset.environment(task) for task in tasks]
        seen = [[await game.reset()] for game in games]
        for move in moves:
            for game, said in zip(games, seen, strict=True):
                random.random()
                if not said[-1].done:
                    said.append(await game.step({"role": "assistant", "content": move}))
        return [[one.messages[0]["content"] for one in said] for said in seen]

    random.seed(3)
    expected = random.Random(3)
    assert asyncio.run(together()) == alone
    for _ in range(60):
        expected.random()
    assert random.random() == expected.random()
    assert len({said[0] for said in alone}) == 3


def test_games_with_three_players_assign_all_seats() -> None:
    taskset = loaded("ThreePlayerTicTacToe-v0")
    tasks = taskset.tasks("train", 20)
    assert {task.payload["seat"] for task in tasks} == {0, 1, 2}
    rng = random.Random(0)

    async def main(task: Task) -> Score:
        environment = taskset.environment(task)
        seen = await environment.reset()
        while not seen.done:
            move = choose_listed_move(seen.messages[0]["content"], rng)
            seen = await environment.step({"role": "assistant", "content": move})
        assert seen.score is not None
        return seen.score

    scores = [asyncio.run(main(task)) for task in tasks]
    assert {score.value for score in scores} <= {-1.0, 0.0, 1.0}
    assert {score.parts["won"] for score in scores} == {0.0, 1.0}


def test_a_game_that_cannot_be_created_raises_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"GuessWho-v0.*OPENROUTER_API_KEY") as caught:
        loaded("GuessWho-v0")
    assert "\n" not in str(caught.value)


def test_a_missing_nltk_resource_raises_an_error_and_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    asked: list[object] = []
    monkeypatch.setattr(nltk, "download", lambda *names, **_: asked.append(names))
    with pytest.raises(UserError) as caught:
        loaded("Hangman-v0")
    assert "nltk.downloader words" in str(caught.value)
    assert not asked


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"env_id": "TicTacTo-v0"}, "TextArena has no game 'TicTacTo-v0'; did you mean 'TicTacToe-v0'?"),
        ({"env_id": []}, "name a game"),
        ({"arguments": {"highest": 3}}, "environment.options.arguments: GuessTheNumber-v0 refuses {'highest': 3}"),
        ({"seat": 1}, "seat = 1: GuessTheNumber-v0 has seats 0 to 0"),
        ({"opponent": "randm"}, "no opponent 'randm'; did you mean 'random'?"),
        ({"opponent": "openai", "opponent_options": {"model": "x"}}, "opponent_options.base_url"),
        ({"opponent": "random", "opponent_options": {"sed": 1}}, "opponent_options.sed: 'random' has no such option"),
        ({"opponent_options": {"api_key": "sk-abcdefghijklmnop123"}}, "environment.options.opponent_options"),
        ({"observation": "all"}, "environment.options.observation"),
    ],
)
def test_bad_options_raise_a_one_line_error(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(**options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_game_without_an_expert_raises_unless_one_is_given() -> None:
    taskset = loaded("2048-v0-mega-easy")
    with pytest.raises(UserError, match="has no expert"):
        taskset.demonstrate(taskset.tasks("train", 1)[0], seed=0)
    taskset = loaded("2048-v0-mega-easy", expert="tests.environments.test_textarena:corner")
    conversation, score = taskset.demonstrate(taskset.tasks("train", 1)[0], seed=0)
    assert {message["content"] for message in conversation if message["role"] == "assistant"} <= {"[down]", "[left]"}
    assert score.valid


def corner(game: Any, seat: int) -> str:
    return "[down]" if game.state.turn % 2 else "[left]"


def test_an_opponent_that_never_ends_its_turn_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    taskset = loaded("Nim-v0", seat=1)
    monkeypatch.setattr(Game, "move", lambda self, text: None)
    with pytest.raises(RuntimeError, match="1000 moves in a row"):
        asyncio.run(taskset.environment(taskset.tasks("train", 1)[0]).reset())
