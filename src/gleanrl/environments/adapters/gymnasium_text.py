"""Environments of gymnasium, played in words: those with texts, and those with few states or actions.

`GymnasiumTaskset` is the environment ``gymnasium`` of the settings. `_Words` holds the words for what is seen and done
in an environment; `TOYS` has them for gymnasium's own small games.
"""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic
from pydantic import Field

from gleanrl.environments.splits import fingerprint, named, select
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import first_line

_MAX_NUMBERS = 64  # of an observation that is written out
_MAX_DEMONSTRATION = 500  # actions
_DISCOUNT = 0.99  # of the expert's values, so that a shorter way is a better one
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_solved: dict[tuple[str, str], np.ndarray] = {}  # (id, kwargs) -> the best action in each state
_COLOUR = re.compile(r"\x1b\[(\d+(?:;\d+)*)m(.*?)\x1b\[0m", re.DOTALL)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class GymnasiumTaskset(Taskset):
    """Episodes of one gymnasium environment, each with its own seed.

    The model names an action anywhere in its message; the last one counts, or the one in ``<action></action>``. A
    message without an action is answered with the list of actions, does not reach the environment, and is counted. The
    score is the sum of rewards; ``parts`` has it as ``return``, with ``steps`` and ``invalid``.

    The seed alone decides the split. Options that change the episode (``max_steps``, ``success``, words of your own)
    are part of a task's id. If an environment draws nothing from its seed (one board, one start), all splits hold the
    same problem.

    Args:
        id: of a registered environment, `FrozenLake-v1`; `module:Name-v0` imports the module that registers it.
        kwargs: of the environment.
        describe: import path of ``fn(observation, environment) -> text``; ``render`` = the environment's own drawing in
            mode "ansi"; None = words for gymnasium's own toy texts, else the observation written out.
        actions: names of a discrete space's actions, in order; None = those of gymnasium's toy texts, else numbers.
        parse: import path of ``fn(text, environment) -> action`` for other spaces; the model reads the ValueError that
            it raises.
        introduction: begins the first message; None = what the toy texts say, then the actions.
        max_steps: of an episode; None = the environment's own limit.
        success: where set, the score is 1 for a sum of rewards of at least this, else 0.
        invalid_reward: added for each message without an action.
        expert: import path of ``fn(observation, environment) -> action``; None = the best action by the
            environment's table of transitions, if it has one.
    """

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    describe: str | None = None
    actions: list[str] | None = None
    parse: str | None = None
    introduction: str | None = None
    max_steps: int | None = Field(default=None, ge=1)
    success: float | None = None
    invalid_reward: float = 0.0
    expert: str | None = None
    seed: int = 0

    has_expert = True

    def __post_init__(self) -> None:
        game = _Words(self)  # raises now for options that are wrong
        game.env.close()

    @property
    def phrases(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The answer to a message without an action."""
        game = _Words(self)
        game.env.close()
        return (game.refusal(),)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        chosen = select(self._candidates(), split, count, f"gymnasium {self.id!r}")
        set_apart = ("max_steps", "success", "describe", "actions", "parse", "introduction")
        unusual = {name: value for name in set_apart if (value := getattr(self, name)) is not None}
        unusual |= {"invalid_reward": self.invalid_reward} if self.invalid_reward else {}
        return [
            Task(
                f"{self.id}-{named(mark, unusual)[:16]}",
                payload={"id": self.id, "kwargs": self.kwargs, "seed": seed, **unusual},
            )
            for mark, seed in chosen
        ]

    def environment(self, task: Task) -> Environment:
        return _Episode(task, self)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        draw = random.Random(seed)
        episode = _Episode(task, self)
        observation = episode.begin()
        said = [*observation.messages]
        for _ in range(_MAX_DEMONSTRATION):
            if observation.done:
                break
            text = episode.expert_says(draw, noise)
            observation = episode.act(text)
            said += [{"role": "assistant", "content": text}, *observation.messages]
        episode.end()
        return tuple(said[:-1] if observation.done else said), observation.score or Score.failed("no score")

    def _candidates(self) -> Iterator[tuple[str, int]]:
        arguments = json.dumps(self.kwargs, sort_keys=True)
        number = 0
        while True:
            seed = derive(self.seed, "gymnasium", self.id, number) % 2**31
            yield fingerprint("gymnasium", self.id, arguments, str(seed)), seed
            number += 1


class _Episode(Environment):
    def __init__(self, task: Task, taskset: GymnasiumTaskset) -> None:
        self._task, self._taskset = task, taskset
        self._words: _Words | None = None
        self._seen: Any = None
        self._total, self._steps, self._invalid = 0.0, 0, 0
        self._over = False

    async def reset(self) -> Observation:
        return self.begin()

    async def step(self, message: Message) -> Observation:
        return self.act(message["content"])

    async def close(self) -> None:
        self.end()

    def begin(self) -> Observation:
        self._words = _Words(self._taskset)
        self._seen, _ = self._words.env.reset(seed=self._task.payload["seed"])
        return self._said(self._words.introduction() + self._words.describe(self._seen, self._words.env))

    def act(self, text: str) -> Observation:
        words = self._words
        if words is None or self._over:
            raise RuntimeError(f"task {self._task.id!r}: no step before reset or after the end")
        try:
            action = words.action(text)
        except ValueError as error:
            self._invalid += 1
            self._total += self._taskset.invalid_reward
            return self._said(str(error))
        self._seen, reward, terminated, truncated, _ = words.env.step(action)
        self._total, self._steps = self._total + float(reward), self._steps + 1
        self._over = bool(terminated or truncated)
        return self._said(words.describe(self._seen, words.env))

    def end(self) -> None:
        words, self._words = self._words, None
        if words is not None:
            words.env.close()

    def expert_says(self, draw: random.Random, noise: float) -> str:
        assert self._words is not None  # it has begun
        return self._words.expert_says(self._seen, draw, noise)

    def _said(self, text: str) -> Observation:
        wanted = self._taskset.success
        value = self._total if wanted is None else float(self._over and self._total >= wanted)
        parts = {"return": self._total, "steps": float(self._steps), "invalid": float(self._invalid)}
        return Observation(({"role": "user", "content": text},), done=self._over, score=Score(value, parts=parts))


class _Words:
    """An environment, and the words for what is seen and done in it.

    Raises:
        UserError: there is no such environment, or no words for it.
    """

    def __init__(self, taskset: GymnasiumTaskset) -> None:
        import gymnasium

        self._taskset = taskset
        self.env = _made(taskset)
        self._toy = TOYS.get(type(self.env.unwrapped).__name__)
        space = self.env.action_space
        self._discrete = isinstance(space, gymnasium.spaces.Discrete)
        self._text = isinstance(space, gymnasium.spaces.Text)
        if taskset.parse is None and not (self._discrete or self._text):
            raise UserError(
                f"environment.options.parse: {taskset.id} wants actions of {space}; give a function for them"
            )
        self._names = self._named() if self._discrete else []
        self._parse: Any = load_object(taskset.parse) if taskset.parse else None
        self.describe = self._describer()

    def introduction(self) -> str:
        given = self._taskset.introduction
        if given is not None:
            return f"{given}\n" if given else ""
        return "".join(f"{line}\n" for line in (self._toy.introduction if self._toy else "", self._listed()) if line)

    def refusal(self) -> str:
        return f"That is no action. {self._listed()}".strip()

    def action(self, text: str) -> Any:
        """The action that the text names. Raises a ValueError that the model reads if there is none."""
        text = answer_of(text)
        if self._parse is not None:
            return self._parse(text, self.env)
        tagged = _ACTION.findall(text)
        said = (tagged[-1] if tagged else text).strip()
        if self._text:
            if said in self.env.action_space:
                return said
            raise ValueError(self.refusal())
        found = list(self._spoken.finditer(said.casefold()))
        if not found:
            raise ValueError(self.refusal())
        return self._start + self._names.index(found[-1].group(0))

    def expert_says(self, observation: Any, draw: random.Random, noise: float) -> str:
        space, taskset = self.env.action_space, self._taskset
        if not self._discrete:
            if taskset.expert is None:
                raise NoExpert(_no_expert(taskset.id))
            return str(load_object(taskset.expert)(observation, self.env))
        if draw.random() < noise:
            return draw.choice(self._names)
        if taskset.expert is not None:
            action = load_object(taskset.expert)(observation, self.env)
        elif self._toy is not None and self._toy.expert is not None:
            action = self._toy.expert(observation)
        elif isinstance(table := getattr(self.env.unwrapped, "P", None), Mapping):
            key = (taskset.id, json.dumps(taskset.kwargs, sort_keys=True))
            if key not in _solved:
                _solved[key] = best_actions(table)
            action = _solved[key][int(observation)] + space.start
        else:
            raise NoExpert(_no_expert(taskset.id))
        return self._names[int(action) - self._start]

    @property
    def _start(self) -> int:
        return int(self.env.action_space.start)

    def _named(self) -> list[str]:
        count = int(self.env.action_space.n)
        given = self._taskset.actions or (self._toy.actions if self._toy else None)
        names = [name.casefold() for name in given or map(str, range(self._start, self._start + count))]
        if len(names) != count or len(set(names)) != count:
            raise UserError(
                f"environment.options.actions: {self._taskset.id} has {count} actions, so give {count} names"
            )
        longest_first = sorted(names, key=len, reverse=True)
        self._spoken = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first))
        return names

    def _listed(self) -> str:
        return f"Actions: {', '.join(self._names)}." if self._names else ""

    def _describer(self) -> Callable[[Any, Any], str]:
        given = self._taskset.describe
        if given == "render":
            return lambda observation, env: uncoloured(str(env.render()))
        if given is not None:
            return load_object(given)
        if self._toy is not None:
            return self._toy.describe
        size = self.env.observation_space.shape
        numbers = math.prod(size or ())
        if numbers > _MAX_NUMBERS:
            raise UserError(
                f"environment.options.describe: an observation of {self._taskset.id} is {numbers} numbers; "
                "give a function that puts it into words"
            )
        return lambda observation, env: in_words(observation)


def in_words(observation: Any) -> str:
    """An observation written out: a text as it is, tables line by line, numbers as they are."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {in_words(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(in_words(value) for value in observation)
    if hasattr(observation, "tolist"):
        observation = observation.tolist()
    if isinstance(observation, float):
        return f"{observation:.4g}"
    return ", ".join(in_words(one) for one in observation) if isinstance(observation, list) else str(observation)


def uncoloured(text: str) -> str:
    """A drawing without its colours; text with a background of its own (the position) stands in brackets."""

    def plain(match: re.Match[str]) -> str:
        background = any(40 <= int(code) <= 47 for code in match.group(1).split(";"))
        return f"[{match.group(2)}]" if background else match.group(2)

    return _COLOUR.sub(plain, text).strip("\n")


def _made(taskset: GymnasiumTaskset) -> Any:
    import gymnasium

    given: dict[str, Any] = {**taskset.kwargs}
    if taskset.describe == "render":
        given.setdefault("render_mode", "ansi")
    if taskset.max_steps is not None:
        given["max_episode_steps"] = taskset.max_steps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gymnasium.make(taskset.id, disable_env_checker=True, **given)
    except gymnasium.error.Error as error:
        raise UserError(f"environment.options.id: {first_line(error)}") from None
    except ImportError as error:
        raise UserError(f"environment.options.id: {taskset.id}: {first_line(error)}") from None
    except Exception as error:
        raise UserError(f"environment.options.kwargs: {taskset.id} refuses {given}: {first_line(error)}") from None


def _no_expert(env_id: str) -> str:
    return (
        f"gymnasium {env_id!r} has no expert: name one in environment.options.expert, or set warm_start.enabled = "
        "false and model.init to a model that knows the task"
    )


# --- gymnasium's own small games in words -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Toy:
    """An environment in words. ``expert`` is for environments without a table of transitions."""

    actions: Sequence[str]
    introduction: str
    describe: Callable[[Any, Any], str]
    expert: Callable[[Any], int] | None = None


def _frozen_lake(observation: Any, env: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(rows[0]))
    rows[row][column] = "*"
    return "\n".join(" ".join(line) for line in rows)


def _cliff_walking(observation: Any, env: Any) -> str:
    row, column = divmod(int(observation), env.unwrapped.shape[1])
    return f"You are at row {row}, column {column}."


_STANDS = ("R", "G", "Y", "B")
_STANDS_AT = ((0, 0), (0, 4), (4, 0), (4, 3))


def _taxi(observation: Any, env: Any) -> str:
    row, column, passenger, goal = env.unwrapped.decode(int(observation))
    waits = "is in the taxi" if passenger == len(_STANDS) else f"waits at {_stand(passenger)}"
    walls = "\n".join("".join(char.decode() for char in line) for line in env.unwrapped.desc)
    place = f"The taxi is at row {row}, column {column}. The passenger {waits} and wants to go to {_stand(goal)}."
    return f"{walls}\n{place}"


def _stand(index: int) -> str:
    row, column = _STANDS_AT[index]
    return f"{_STANDS[index]} (row {row}, column {column})"


def _blackjack(observation: Any, env: Any) -> str:
    own, dealer, ace = observation
    return f"Your cards are worth {own}, {'with' if ace else 'without'} a usable ace. The dealer shows {dealer}."


def _stick_or_hit(observation: Any) -> int:
    own, dealer, ace = (int(value) for value in observation)
    if ace:
        return int(own < (18 if dealer <= 8 else 19))
    return int(own < (12 if 4 <= dealer <= 6 else 13 if dealer in (2, 3) else 17))


TOYS: Mapping[str, Toy] = {
    "FrozenLakeEnv": Toy(
        ("left", "down", "right", "up"),
        "Cross the frozen lake from S to the goal G without falling into a hole H. F is ice, * is you.",
        _frozen_lake,
    ),
    "CliffWalkingEnv": Toy(
        ("up", "right", "down", "left"),
        "Walk from row 3, column 0 to row 3, column 11 of a field with rows 0 to 3 and columns 0 to 11. Columns 1 to "
        "10 of row 3 are a cliff: who steps there is back at the start.",
        _cliff_walking,
    ),
    "TaxiEnv": Toy(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up and drop them off where they want to go. Row 0 is in the north, "
        "column 0 in the west; | is a wall.",
        _taxi,
    ),
    "BlackjackEnv": Toy(
        ("stick", "hit"),
        "Come closer to 21 than the dealer without going over it.",
        _blackjack,
        _stick_or_hit,
    ),
}
"""By the class of gymnasium's environment."""


def best_actions(table: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> np.ndarray:
    """int[states]: the best action in each state, by value iteration.

    ``table``: the environment's ``P``; ``P[state][action]`` lists (probability, next state, reward, terminated).
    """
    states, actions = len(table), len(table[0])
    most = max(len(table[s][a]) for s in range(states) for a in range(actions))
    chance, following, reward = (np.zeros((states, actions, most)) for _ in range(3))
    goes_on = np.zeros((states, actions, most))
    for s in range(states):
        for a in range(actions):
            for k, (p, to, r, over) in enumerate(table[s][a]):
                chance[s, a, k], following[s, a, k], reward[s, a, k], goes_on[s, a, k] = p, to, r, not over
    follow = following.astype(int)
    values, worth = np.zeros(states), np.zeros((states, actions))
    for _ in range(5000):
        worth = (chance * (reward + _DISCOUNT * goes_on * values[follow])).sum(-1)
        if np.abs(worth.max(-1) - values).max() < 1e-10:
            break
        values = worth.max(-1)
    return worth.argmax(-1)
