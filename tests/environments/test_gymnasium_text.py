"""`GymnasiumTaskset`: gymnasium's toy text environments, and user-defined ones, played with text messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.adapters.gymnasium_text import GymnasiumTaskset, strip_colours, write_out
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Observation, Split
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

gymnasium: Any = pytest.importorskip("gymnasium")

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")
HERE = "tests.environments.test_gymnasium_text"
STRAIGHT = {"kwargs": {"is_slippery": False}}


class Parrot(gymnasium.Env):
    """An environment with text actions, whose reward is 1 if the action repeats the word that was shown."""

    observation_space = gymnasium.spaces.Dict(
        {
            "say": gymnasium.spaces.Text(10),
            "left": gymnasium.spaces.Discrete(9),
            "mood": gymnasium.spaces.Box(0, 1, (2,)),
        }
    )
    action_space = gymnasium.spaces.Text(5, charset="abc")

    def __init__(self, times: int = 2) -> None:
        self.times = times

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = self.times
        return self._seen(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = float(action == self.word)
        self.left -= 1
        return self._seen(), right, self.left == 0, False, {}

    def _seen(self) -> Any:
        self.word = "".join("abc"[i] for i in self.np_random.integers(0, 3, 3))
        return {"say": self.word, "left": self.left, "mood": self.np_random.random(2)}


class Dial(gymnasium.Env):
    """An environment whose actions and observations can only be converted from and to text by user functions."""

    observation_space = gymnasium.spaces.Box(0, 1, (30, 30))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action: float) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample() * 0, float(action), True, False, {}


gymnasium.register("gleanrl-tests/Parrot-v0", Parrot)
gymnasium.register("gleanrl-tests/Dial-v0", Dial)


def number(text: str, env: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("say a number") from None


def nothing(observation: Any, env: Any) -> str:
    return f"{observation.size} zeros"


def parrot(observation: Any, env: Any) -> str:
    return observation["say"]


def loaded(env_id: str = "FrozenLake-v1", **options: Any) -> GymnasiumTaskset:
    taskset = load_taskset(EnvironmentSettings(name="gymnasium", options={"id": env_id, **options}), seed=2)
    assert isinstance(taskset, GymnasiumTaskset)
    return taskset


def played(taskset: GymnasiumTaskset, task: Task, said: list[str], workers: int = 0) -> list[Observation]:
    async def main() -> list[Observation]:
        async with EnvironmentPool(taskset, workers=workers) as pool:
            environment = pool.environment(task)
            seen = [await environment.reset()]
            for text in said:
                if seen[-1].done:
                    break
                seen.append(await environment.step({"role": "assistant", "content": text}))
            await environment.close()
            return seen

    return asyncio.run(main())


def first(taskset: GymnasiumTaskset) -> Task:
    return taskset.tasks("train", 1)[0]


def score_of(seen: list[Observation]) -> Score:
    assert seen[-1].score is not None
    return seen[-1].score


def return_of_actions(env_id: str, seed: int, actions: list[int], **kwargs: Any) -> float:
    """Return the sum of rewards that gymnasium gives for the actions, without Glean RL's adapter."""
    env = gymnasium.make(env_id, **kwargs)
    env.reset(seed=seed)
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return total


@pytest.mark.parametrize(
    ("env_id", "least", "most_random"),
    [
        ("FrozenLake-v1", 0.5, 0.1),
        ("Taxi-v4", 7.0, -100.0),
        ("CliffWalking-v1", -13.0, -500.0),
        ("Blackjack-v1", -0.3, -0.3),
    ],
)
def test_experts_play_toy_text_environments_better_than_random(env_id: str, least: float, most_random: float) -> None:
    taskset = loaded(env_id)
    tasks = taskset.tasks("train", 60)
    shown = [taskset.demonstrate(task, seed=i) for i, task in enumerate(tasks)]
    stray = [taskset.demonstrate(task, seed=i, noise=1.0)[1].value for i, task in enumerate(tasks[:20])]
    best = [score.value for _, score in shown]
    assert sum(best) / len(best) >= least
    assert sum(stray) / len(stray) <= most_random
    for task, (conversation, score) in list(zip(tasks, shown, strict=True))[:5]:
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        seen = played(taskset, task, said)
        assert seen[-1].done
        assert score_of(seen) == score
        names = _action_names(taskset, conversation[0]["content"])
        assert score.value == return_of_actions(env_id, task.payload["seed"], [names.index(text) for text in said])


def _action_names(taskset: GymnasiumTaskset, opening: str) -> list[str]:
    listed = next(line for line in opening.splitlines() if line.startswith("Actions: "))
    return listed.removeprefix("Actions: ").removesuffix(".").split(", ")


def test_tasks_are_deterministic_and_no_seed_is_in_two_splits() -> None:
    taskset = loaded("Taxi-v4")
    tasks = {split: taskset.tasks(split, 30) for split in SPLITS}
    assert len({task.id for found in tasks.values() for task in found}) == 90
    assert len({task.payload["seed"] for found in tasks.values() for task in found}) == 90
    assert list(loaded("Taxi-v4").tasks("eval", 60)[:30]) == tasks["eval"]
    assert json.loads(json.dumps(tasks["eval"][0].payload)) == tasks["eval"][0].payload
    assert first(loaded("FrozenLake-v1", **STRAIGHT)).id != first(loaded("FrozenLake-v1")).id


def test_tasks_with_other_options_have_other_ids_but_the_same_seeds_and_split() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"max_steps": 20},
        {"max_steps": 20, "success": 1.0},
        {"invalid_reward": -1.0},
        {"actions": list("abcd")},
        {"describe": "render"},
        {"introduction": ""},
        {"parse": "tests.environments.test_gymnasium_text:number"},
    ]
    for split in SPLITS:
        found = [loaded("FrozenLake-v1", **given).tasks(split, 5) for given in options]
        assert len({task.id for tasks in found for task in tasks}) == 5 * len(options)
        for given, tasks in zip(options, found, strict=True):
            assert [task.payload["seed"] for task in tasks] == [task.payload["seed"] for task in found[0]]
            assert all(given.items() <= task.payload.items() for task in tasks)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_message_without_an_action_gets_a_reminder_and_counts_as_invalid(workers: int) -> None:
    taskset = loaded(**STRAIGHT, invalid_reward=-0.25)
    seen = played(taskset, first(taskset), ["fly", "go <action>DOWN</action> and left", "upright"], workers)
    named = "That is no action. Actions: left, down, right, up."
    assert [s.messages[0]["content"] == named for s in seen] == [False, True, False, True]
    # The action "down" has moved the player to the second row.
    assert seen[2].messages[0]["content"].splitlines()[1].startswith("*")
    assert score_of(seen) == Score(-0.5, parts={"return": -0.5, "steps": 1.0, "invalid": 2.0})
    assert [s.reward for s in seen] == [None, -0.25, 0.0, -0.25]
    assert taskset.phrases == (named,)


@pytest.mark.parametrize(
    ("said", "row", "column"),
    [("right", 0, 1), ("I go Right.", 0, 1), ("not down but right", 0, 1), ("<think>down</think> right", 0, 1)],
)
def test_the_last_action_named_in_a_message_is_taken(said: str, row: int, column: int) -> None:
    taskset = loaded(**STRAIGHT)
    board = [line.split() for line in played(taskset, first(taskset), [said])[1].messages[0]["content"].splitlines()]
    assert board[row][column] == "*"


def test_an_action_inside_an_unclosed_think_tag_is_not_taken() -> None:
    taskset = loaded(**STRAIGHT)
    assert score_of(played(taskset, first(taskset), ["<think>down, then right"])).parts["invalid"] == 1.0


def test_actions_can_be_renamed_by_the_actions_option() -> None:
    taskset = loaded(actions=["west", "south", "east", "north"], introduction="Go.", **STRAIGHT)
    seen = played(taskset, first(taskset), ["east", "right"])
    assert seen[0].messages[0]["content"].startswith("Go.\n* F F F")
    assert seen[1].messages[0]["content"].startswith("S * F F")
    assert "Actions: west, south, east, north." in seen[2].messages[0]["content"]
    with pytest.raises(UserError, match="FrozenLake-v1 has 4 actions, so give 4 names"):
        loaded(actions=["a", "b"])


def test_max_steps_ends_an_episode_and_success_sets_the_return_that_counts_as_one() -> None:
    taskset = loaded("CliffWalking-v1", max_steps=3, success=-3.0)
    seen = played(taskset, first(taskset), ["up"] * 9)
    assert (len(seen), seen[-1].done) == (4, True)
    assert (score_of(seen).value, score_of(seen).parts["return"]) == (1.0, -3.0)
    assert [s.score.value for s in seen[:-1] if s.score] == [0.0, 0.0, 0.0]
    assert [s.reward for s in seen] == [None] * 4, "the score is not the sum of the environment's rewards"
    # Every move to the right falls off the cliff, which costs 100.
    seen = played(taskset, first(taskset), ["right"] * 9)
    assert (score_of(seen).value, score_of(seen).parts["return"]) == (0.0, -300.0)
    with pytest.raises(RuntimeError, match="no step before reset or after the end"):
        asyncio.run(taskset.environment(first(taskset)).step({"role": "assistant", "content": "up"}))


def test_describe_render_shows_the_environments_own_text_rendering() -> None:
    taskset = loaded("Taxi-v4", describe="render")
    [opening] = played(taskset, first(taskset), [])
    board = [line for line in opening.messages[0]["content"].splitlines() if line.startswith(("|", "+"))]
    assert len(board) == 7
    assert "\x1b" not in opening.messages[0]["content"]
    # Square brackets mark the coloured cell, which is the taxi.
    assert sum("[" in line for line in board) == 1
    assert strip_colours("\n\x1b[41mS\x1b[0mF\x1b[35mG\x1b[0m\n") == "[S]FG"


def test_a_user_defined_environment_with_text_and_dict_spaces_is_played() -> None:
    taskset = loaded("gleanrl-tests/Parrot-v0", kwargs={"times": 3}, introduction="Repeat.", expert=f"{HERE}:parrot")
    task = first(taskset)
    seen = played(taskset, task, ["zzz", "aaa"])
    lines = seen[0].messages[0]["content"].splitlines()
    assert (lines[0], [line.split(":")[0] for line in lines[1:]]) == ("Repeat.", ["say", "left", "mood"])
    # The action space has only the letters a, b and c.
    assert seen[1].messages[0]["content"] == "That is no action."
    assert (seen[2].score or Score(9)).parts["steps"] == 1.0
    conversation, score = taskset.demonstrate(task, seed=0)
    assert (score.value, len(conversation)) == (3.0, 6)
    assert write_out({"a": (1, 2.5), "b": [True]}) == "a: 1, 2.5\nb: True"


def test_spaces_without_a_text_form_need_parse_and_describe_functions() -> None:
    with pytest.raises(UserError, match=r"environment\.options\.parse: gleanrl-tests/Dial-v0 wants actions of Box"):
        loaded("gleanrl-tests/Dial-v0")
    with pytest.raises(UserError, match=r"environment\.options\.describe: .* is 900 numbers"):
        loaded("gleanrl-tests/Dial-v0", parse=f"{HERE}:number")
    taskset = loaded("gleanrl-tests/Dial-v0", parse=f"{HERE}:number", describe=f"{HERE}:nothing")
    seen = played(taskset, first(taskset), ["much", "0.5"])
    assert [s.messages[0]["content"] for s in seen] == ["900 zeros", "say a number", "900 zeros"]
    assert (seen[-1].done, score_of(seen).value) == (True, 0.5)
    with pytest.raises(UserError, match="has no expert"):
        taskset.demonstrate(first(taskset), seed=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"env_id": "FrozenLak-v1"}, "environment.options.id: "),
        ({"env_id": "Taxi-v3"}, "environment.options.id: Environment version v3 for `Taxi` is deprecated"),
        ({"env_id": "nowhere:Nothing-v0"}, "environment.options.id: "),
        ({"kwargs": {"slippery": True}}, "environment.options.kwargs: FrozenLake-v1 refuses {'slippery': True}"),
        ({"describe": "nowhere:fn"}, "nowhere"),
        ({"max_steps": 0}, "environment.options.max_steps = 0"),
        ({"action": ["a"]}, "environment.options.action: 'gymnasium' has no such option; did you mean 'actions'?"),
    ],
)
def test_bad_options_raise_a_one_line_error(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(**options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
