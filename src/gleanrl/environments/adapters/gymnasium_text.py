"""Turns gymnasium environments into text environments for a language model.

`GymnasiumTaskset` is the environment ``gymnasium`` of the settings. It writes each observation as text, and reads an
action from each message of the model. This works without further code for observations that are texts or have few
numbers, and for actions that are discrete or texts. For other environments, the user names functions that convert
observations and actions. gymnasium's toy games (`TOYS`) have built-in descriptions and experts.
"""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import count as count_from
from typing import Any

import numpy as np
import pydantic
from pydantic import Field

from gleanrl.environments.adapters.demonstrations import play_expert
from gleanrl.environments.splits import fingerprint, named, select
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import first_line

# An observation with more values than this, such as an image, is only accepted with a function that describes it.
_MAX_NUMBERS = 64
_MAX_DEMONSTRATION = 500  # number of messages after which a demonstration is cut off
_DISCOUNT = 0.99  # discount factor of value iteration; it is below 1 so that the expert prefers shorter paths
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[(\d+(?:;\d+)*)m(.*?)\x1b\[0m", re.DOTALL)
_TAXI_STANDS = ("R (row 0, column 0)", "G (row 0, column 4)", "Y (row 4, column 0)", "B (row 4, column 3)")
_solutions: dict[tuple[str, str], np.ndarray] = {}  # cache: (id, kwargs as JSON) -> best action in each state

TOYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "FrozenLakeEnv": (
        "Cross the frozen lake from S to the goal G without falling into a hole H. F is ice, * is you.",
        ("left", "down", "right", "up"),
    ),
    "CliffWalkingEnv": (
        "Walk from row 3, column 0 to row 3, column 11 of a field with rows 0 to 3 and columns 0 to 11. Columns 1 to "
        "10 of row 3 are a cliff: who steps there is back at the start.",
        ("up", "right", "down", "left"),
    ),
    "TaxiEnv": (
        "Drive the taxi to the passenger, pick them up and drop them off where they want to go. Row 0 is in the north, "
        "column 0 in the west; | is a wall.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "BlackjackEnv": (
        "Come closer to 21 than the dealer without going over it.",
        ("stick", "hit"),
    ),
}
"""The toy games of gymnasium that have built-in texts: class name -> (introduction, names of the actions in order)."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class GymnasiumTaskset(Taskset):
    """Makes tasks from one gymnasium environment. Each task resets the environment with another seed.

    In each turn the model names one of the actions in its message. If the message has ``<action>...</action>`` tags,
    only the text in the last tag counts. If this text or message names several actions, the last one is taken. A
    message without an action is not passed to the environment: it is counted as ``invalid``, and the model gets the
    list of actions as the answer. If the action space is `gymnasium.spaces.Text`, the text itself is the action.

    The score is the sum of the rewards, unless ``success`` is set. Its ``parts`` are ``return`` (the sum of the
    rewards), ``steps`` (the number of actions) and ``invalid`` (the number of messages without an action).

    Only ``id``, ``kwargs`` and a task's seed decide the task's split. Options that change the episode (``max_steps``,
    ``success``, ``invalid_reward`` and the texts) are part of the task's id. If an environment makes no use of its
    seed, because it has for example a single board and a single start, the same problem is in all splits.
    """

    id: str
    """Id of a registered environment, such as `FrozenLake-v1`. With `module:Name-v0`, gymnasium first imports
    ``module``, which must register the environment."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    describe: str | None = None
    """Import path of a function ``fn(observation, environment) -> text``. "render" shows the model the environment's
    own drawing in render mode "ansi". None = the built-in description for one of the toy games, otherwise the values of
    the observation."""
    actions: list[str] | None = None
    """Names of the actions of a discrete action space, in the order of the actions. None = built-in names for one of
    the toy games, otherwise the actions' numbers."""
    parse: str | None = None
    """Import path of a function ``fn(text, environment) -> action``. An action space that is neither discrete nor of
    texts needs it. If the function raises a ValueError, the message counts as ``invalid``, and the model gets the
    error's text as the answer."""
    introduction: str | None = None
    """Text before the first observation. None = the toy game's introduction, if there is one, and the list of
    actions."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of actions in an episode. None = the limit with which the environment is registered."""
    success: float | None = None
    """If set, the score is 1 for an episode that has ended with a sum of rewards of at least this value, and 0 for any
    other episode."""
    invalid_reward: float = 0.0
    """Reward that is added for each message without an action."""
    expert: str | None = None
    """Import path of a function ``fn(observation, environment) -> action`` that plays demonstrations. None = the best
    action according to the environment's table of transitions (for Blackjack, a fixed strategy). An environment without
    such a table then has no expert."""
    seed: int = 0
    """Seed from which the environments' seeds are drawn."""

    has_expert = True

    def __post_init__(self) -> None:
        # Make an environment, so that wrong options are reported now and not in the first episode.
        _Episode(self, seed=0).env.close()

    @property
    def phrases(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The text that the model gets as the answer to a message without an action; see `Taskset.phrases`."""
        episode = _Episode(self, seed=0)
        episode.env.close()
        return (episode.refusal,)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        changes: dict[str, Any] = {"invalid_reward": self.invalid_reward} if self.invalid_reward else {}
        for option in ("max_steps", "success", "describe", "actions", "parse", "introduction"):
            if getattr(self, option) is not None:
                changes[option] = getattr(self, option)
        tasks = []
        for mark, seed in select(self._candidates(), split, count, f"gymnasium {self.id!r}"):
            payload = {"id": self.id, "kwargs": self.kwargs, "seed": seed, **changes}
            tasks.append(Task(f"{self.id}-{named(mark, changes)[:16]}", payload=payload))
        return tasks

    def environment(self, task: Task) -> Environment:
        return _Episode(self, task.payload["seed"])

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        rng = random.Random(seed)
        episode = _Episode(self, task.payload["seed"])
        return play_expert(episode, lambda: episode.expert_message(rng, noise), _MAX_DEMONSTRATION)

    def _candidates(self) -> Iterator[tuple[str, int]]:
        kwargs = json.dumps(self.kwargs, sort_keys=True)
        for number in count_from():
            seed = derive(self.seed, "gymnasium", self.id, number) % 2**31
            yield fingerprint("gymnasium", self.id, kwargs, str(seed)), seed


class _Episode(Environment):
    """One episode of a gymnasium environment. It writes observations as text and reads actions from messages.

    Raises:
        UserError: gymnasium cannot make the environment, ``actions`` does not name all of its actions, or the
            environment needs ``describe`` or ``parse`` and the taskset does not set them.
    """

    def __init__(self, taskset: GymnasiumTaskset, seed: int) -> None:
        import gymnasium

        self._taskset, self._seed = taskset, seed
        self.env = _make_env(taskset)
        self._toy = type(self.env.unwrapped).__name__
        introduction, names = TOYS.get(self._toy, ("", ()))
        space = self.env.action_space
        self._actions: list[str] = []
        if isinstance(space, gymnasium.spaces.Discrete):
            first, count = int(space.start), int(space.n)
            given = taskset.actions or names or map(str, range(first, first + count))
            self._actions = [name.casefold() for name in given]
            if len(set(self._actions)) != count or len(self._actions) != count:
                raise UserError(f"environment.options.actions: {taskset.id} has {count} actions, so give {count} names")
        elif taskset.parse is None and not isinstance(space, gymnasium.spaces.Text):
            raise UserError(
                f"environment.options.parse: {taskset.id} wants actions of {space}; give a function for them"
            )
        self._parse: Any = load_object(taskset.parse) if taskset.parse else None
        self._describe: Any = load_object(taskset.describe) if taskset.describe not in (None, "render") else None
        numbers = math.prod(self.env.observation_space.shape or ())
        if taskset.describe is None and self._toy not in TOYS and numbers > _MAX_NUMBERS:
            raise UserError(
                f"environment.options.describe: an observation of {taskset.id} is {numbers} numbers; "
                "give a function that puts it into words"
            )
        listed = f"Actions: {', '.join(self._actions)}." if self._actions else ""
        self.refusal = f"That is no action. {listed}".strip()
        lines = [introduction, listed] if taskset.introduction is None else [taskset.introduction]
        self._introduction = "".join(f"{line}\n" for line in lines if line)
        self._observation: Any = None
        self._return, self._steps, self._invalid = 0.0, 0, 0
        self._running, self._over = False, False

    async def reset(self) -> Observation:
        self._observation, _ = self.env.reset(seed=self._seed)
        self._running = True
        return self._answer(self._introduction + self._in_words())

    async def step(self, message: Message) -> Observation:
        if not self._running or self._over:
            raise RuntimeError(f"{self._taskset.id}, seed {self._seed}: no step before reset or after the end")
        try:
            action = self._read_action(answer_of(message["content"]))
        except ValueError as error:
            self._invalid += 1
            self._return += self._taskset.invalid_reward
            return self._answer(str(error), self._taskset.invalid_reward)
        self._observation, reward, terminated, truncated, _ = self.env.step(action)
        self._return += float(reward)
        self._steps += 1
        self._over = bool(terminated or truncated)
        return self._answer(self._in_words(), float(reward))

    async def close(self) -> None:
        self._running = False
        self.env.close()

    def expert_message(self, rng: random.Random, noise: float) -> str:
        """Return the expert's next message.

        It is the name of the best action or, with probability ``noise``, the name of a random action. If the actions
        have no names, it is the action as text.

        Raises:
            NoExpert: the taskset names no expert, and no best action is known because the environment has no table of
                transitions and is not Blackjack.
        """
        taskset = self._taskset
        if self._actions and rng.random() < noise:
            return rng.choice(self._actions)
        table = getattr(self.env.unwrapped, "P", None)
        if taskset.expert is not None:
            action = load_object(taskset.expert)(self._observation, self.env)
            if not self._actions:
                return str(action)
            index = int(action) - int(self.env.action_space.start)
        elif self._toy == "BlackjackEnv":
            own, dealer, ace = (int(value) for value in self._observation)
            if ace:
                enough = 18 if dealer <= 8 else 19
            elif dealer in (2, 3):
                enough = 13
            else:
                enough = 12 if dealer in (4, 5, 6) else 17
            index = int(own < enough)
        elif self._actions and isinstance(table, Mapping):
            key = (taskset.id, json.dumps(taskset.kwargs, sort_keys=True))
            if key not in _solutions:
                _solutions[key] = best_actions(table)
            index = int(_solutions[key][int(self._observation)])
        else:
            raise NoExpert(
                f"gymnasium {taskset.id!r} has no expert: name one in environment.options.expert, or set "
                "warm_start.enabled = false and model.init to a model that knows the task"
            )
        return self._actions[index]

    def _read_action(self, text: str) -> Any:
        """Return the action that ``text`` names, as an element of the action space.

        Raises:
            ValueError: ``text`` names no action. The error's message is the answer that the model gets.
        """
        if self._parse is not None:
            return self._parse(text, self.env)
        tagged = _ACTION.findall(text)
        text = (tagged[-1] if tagged else text).strip()
        if not self._actions:
            if text not in self.env.action_space:
                raise ValueError(self.refusal)
            return text
        longest_first = sorted(self._actions, key=len, reverse=True)
        found = re.findall("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first), text.casefold())
        if not found:
            raise ValueError(self.refusal)
        return int(self.env.action_space.start) + self._actions.index(found[-1])

    def _in_words(self) -> str:
        if self._taskset.describe == "render":
            return strip_colours(str(self.env.render()))
        if self._describe is not None:
            return self._describe(self._observation, self.env)
        if self._toy in TOYS:
            return describe_toy(self._observation, self.env.unwrapped)
        return write_out(self._observation)

    def _answer(self, text: str, reward: float | None = None) -> Observation:
        success = self._taskset.success
        value = self._return if success is None else float(self._over and self._return >= success)
        parts = {"return": self._return, "steps": float(self._steps), "invalid": float(self._invalid)}
        score = Score(value, parts=parts)
        reward = reward if success is None else None  # otherwise the score is no sum of the environment's rewards
        return Observation(({"role": "user", "content": text},), done=self._over, score=score, reward=reward)


def _make_env(taskset: GymnasiumTaskset) -> Any:
    import gymnasium

    kwargs: dict[str, Any] = {**taskset.kwargs}
    if taskset.describe == "render":
        kwargs.setdefault("render_mode", "ansi")
    if taskset.max_steps is not None:
        kwargs["max_episode_steps"] = taskset.max_steps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gymnasium.make(taskset.id, disable_env_checker=True, **kwargs)
    except gymnasium.error.Error as error:
        raise UserError(f"environment.options.id: {first_line(error)}") from None
    except ImportError as error:
        raise UserError(f"environment.options.id: {taskset.id}: {first_line(error)}") from None
    except Exception as error:
        raise UserError(f"environment.options.kwargs: {taskset.id} refuses {kwargs}: {first_line(error)}") from None


# --- observations as text -------------------------------------------------------------------------------------
def write_out(observation: Any) -> str:
    """Return an observation as text.

    A text stays unchanged. A mapping gets one line per entry, and the values of arrays and sequences are separated by
    commas. Floats have four significant digits.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {write_out(value)}" for name, value in observation.items())
    if hasattr(observation, "tolist"):
        observation = observation.tolist()
    if isinstance(observation, float):
        return f"{observation:.4g}"
    if isinstance(observation, tuple | list):
        return ", ".join(write_out(value) for value in observation)
    return str(observation)


def strip_colours(drawing: str) -> str:
    """Remove the ANSI colour codes from a drawing.

    Text with a background colour is put in brackets, because the toy games mark the player's position by such a colour.
    """

    def plain(match: re.Match[str]) -> str:
        background = any(40 <= int(code) <= 47 for code in match.group(1).split(";"))
        return f"[{match.group(2)}]" if background else match.group(2)

    return _COLOUR.sub(plain, drawing).strip("\n")


def describe_toy(observation: Any, env: Any) -> str:
    """Return a description of an observation of one of the `TOYS`. ``env`` is the environment without wrappers."""
    match type(env).__name__:
        case "FrozenLakeEnv":
            rows = [[cell.decode() for cell in row] for row in env.desc]
            row, column = divmod(int(observation), len(rows[0]))
            rows[row][column] = "*"
            return "\n".join(" ".join(line) for line in rows)
        case "CliffWalkingEnv":
            row, column = divmod(int(observation), env.shape[1])
            return f"You are at row {row}, column {column}."
        case "TaxiEnv":
            walls = "\n".join("".join(char.decode() for char in line) for line in env.desc)
            row, column, passenger, goal = env.decode(int(observation))
            in_taxi = passenger == len(_TAXI_STANDS)
            waits = "is in the taxi" if in_taxi else f"waits at {_TAXI_STANDS[passenger]}"
            place = f"The taxi is at row {row}, column {column}. The passenger {waits}"
            return f"{walls}\n{place} and wants to go to {_TAXI_STANDS[goal]}."
        case _:  # BlackjackEnv
            own, dealer, ace = observation
            with_ace = "with" if ace else "without"
            return f"Your cards are worth {own}, {with_ace} a usable ace. The dealer shows {dealer}."


def best_actions(table: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> np.ndarray:
    """Compute the best action in each state by value iteration. Returns int[states].

    ``table`` is the attribute ``P`` of an environment: ``P[state][action]`` is a list of tuples (probability, next
    state, reward, terminated).
    """
    states, actions = len(table), len(table[0])
    outcomes = max(len(table[s][a]) for s in range(states) for a in range(actions))
    shape = (states, actions, outcomes)
    probability, reward, goes_on = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    following = np.zeros(shape, dtype=int)
    for s in range(states):
        for a in range(actions):
            for k, (p, to, r, over) in enumerate(table[s][a]):
                probability[s, a, k], following[s, a, k], reward[s, a, k], goes_on[s, a, k] = p, to, r, not over
    values, worth = np.zeros(states), np.zeros((states, actions))
    for _ in range(5000):
        worth = (probability * (reward + _DISCOUNT * goes_on * values[following])).sum(-1)
        if np.abs(worth.max(-1) - values).max() < 1e-10:
            break
        values = worth.max(-1)
    return worth.argmax(-1)
