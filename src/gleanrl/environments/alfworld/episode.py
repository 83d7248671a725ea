"""Plays a game in the prompt format of its task: a model in `AlfworldEnvironment`, the expert in `Demonstration`.

`played_examples` writes games of the expert as text, for the format ``react``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count as count_from
from typing import Any

from gleanrl.environments.alfworld import prompts
from gleanrl.environments.alfworld.engine import BANNER, NOTHING, Game
from gleanrl.environments.alfworld.expert import Expert, Order
from gleanrl.environments.alfworld.games import game_of, household_task
from gleanrl.environments.alfworld.households import Layout, draw, layout_seen, split_of
from gleanrl.protocols import Environment, Observation
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.seeding import derive

EXPERT_STEPS = 100  # commands; more where there is more to search
_EXAMPLE_COMMANDS = (4, 16)  # of the expert; a longer search teaches nothing more and costs context


class AlfworldEnvironment(Environment):
    """One episode of one household: commands in, the game's answers out, 1 for reaching the goal.

    The observations' ``info`` holds ``won``, ``valid_action`` (whether the game took the last command; thoughts are
    always valid) and, if asked for, ``admissible_commands``.
    """

    def __init__(self, task: Task, *, banner: bool = False, admissible_commands: bool = False) -> None:
        self._task = task
        self._banner = banner
        self._list_admissible = admissible_commands
        self._prompt: str = task.payload.get("prompt", "plain")
        self._game: Game | None = None
        self._state = 0
        self._turns = self._valid = 0

    async def reset(self) -> Observation:
        self._game = game = game_of(self._task)
        self._state = game.start
        self._turns = self._valid = 0
        return self._observe(game, opening_of(self._task, game, banner=self._banner), won=False)

    async def step(self, message: Message) -> Observation:
        if self._game is None:
            raise RuntimeError("step before reset, or after close")
        said = prompts.read(self._prompt, message["content"])
        self._turns += 1
        if said.thought:
            self._valid += 1
            return self._observe(self._game, prompts.THOUGHT_HEARD, won=False)
        answer, self._state, won = self._game.step(self._state, said.command)
        self._valid += answer != NOTHING
        text = prompts.shown(self._prompt, answer, self._offered(self._game))
        return self._observe(self._game, text, won=won, valid=answer != NOTHING)

    async def close(self) -> None:
        self._game = None

    def _offered(self, game: Game) -> tuple[str, ...]:
        return game.admissible(self._state) if self._prompt == "admissible" else ()

    def _observe(self, game: Game, text: str, *, won: bool, valid: bool = True) -> Observation:
        info: dict[str, Any] = {"won": won, "valid_action": valid}
        if self._list_admissible:
            info["admissible_commands"] = game.admissible(self._state)
        parts = {} if self._prompt == "plain" or not self._turns else {"valid_actions": self._valid / self._turns}
        score = Score(float(won), parts=parts)
        return Observation(({"role": "user", "content": text},), done=won, score=score, info=info)


def opening_of(task: Task, game: Game, *, banner: bool) -> str:
    """The first message of an episode."""
    prompt = task.payload.get("prompt", "plain")
    offered = game.admissible(game.start) if prompt == "admissible" else ()
    text = game.intro if banner else game.intro.removeprefix(BANNER)
    return prompts.opening(prompt, text, task.payload.get("examples", ""), offered)


@dataclass
class Demonstration:
    """The expert at work: its conversation so far, and whether it has won."""

    task: Task
    seed: int
    banner: bool = False
    messages: list[Message] = field(default_factory=list)
    commands: int = 0
    closing: str = ""  # the game's last answer, which no message holds
    won: bool = False

    def play(self, noise: float = 0.0) -> Demonstration:
        """Up to the command that wins, or to as many as are more than enough for a search of the whole house."""
        game, prompt = game_of(self.task), self.task.payload.get("prompt", "plain")
        expert = expert_of(self.task, game, derive(self.seed, "alfworld", "expert", self.task.id))
        narrator = prompts.Narrator(expert)
        rng = random.Random(derive(self.seed, "alfworld", "noise", self.task.id))
        answer, state = opening_of(self.task, game, banner=self.banner), game.start
        for _ in range(max(EXPERT_STEPS, 4 * len(expert.receptacles))):
            command = expert.act()
            random_turn = bool(noise) and rng.random() < noise
            if random_turn:
                command = rng.choice([c for c in game.admissible(state) if c != "help"])
            elif prompt == "react":
                for thought in narrator.thoughts(command):
                    self._exchange(answer, prompts.thinking(thought))
                    answer = prompts.THOUGHT_HEARD
            thought = "" if prompt != "admissible" else _WHIM if random_turn else narrator.why(command)[1]
            self._exchange(answer, prompts.spoken(prompt, command, thought))
            self.closing, state, self.won = game.step(state, command)
            self.commands += 1
            expert.observe(command, self.closing)
            if self.won:
                break
            answer = prompts.shown(prompt, self.closing, game.admissible(state) if prompt == "admissible" else ())
        return self

    def _exchange(self, answer: str, content: str) -> None:
        self.messages.append({"role": "user", "content": answer})
        self.messages.append({"role": "assistant", "content": content})


_WHIM = "I try something else."


def expert_of(task: Task, game: Game, seed: int) -> Expert:
    """The expert on a game; it reads the goal in the game's words, or in the task's payload where those are free.

    Raises:
        NoExpert: neither says what the goal is.
    """
    payload = task.payload
    order = None
    if payload.get("target") and "goal" in payload:
        destination = payload.get("destination") or "desklamp"
        order = Order(payload["goal"], payload["target"], destination)
    expert = Expert.reading(game.intro, game.task, seed, otherwise=order)
    if expert is None:
        raise NoExpert(f"the expert cannot read the goal {game.task!r} of task {task.id}; its wording is free")
    return expert


@lru_cache(maxsize=64)
def played_examples(prompt: str, goal: str, count: int) -> str:
    """``count`` games with this goal as text, the same for every task and run; empty for 0."""
    layout = Layout(goals=(goal,), receptacles=(8, 10), objects=(6, 9))
    found: list[str] = []
    targets: set[str] = set()
    for index in count_from():
        if len(found) == count:
            return "\n\n".join(found)
        household = draw(layout, derive(0, "alfworld", "example", goal, index))
        if household is None or split_of(household.key) != "warm_start" or not layout_seen(household.layout_key):
            continue
        if household.target in targets:
            continue
        task = household_task(household)
        task = replace(task, payload={**task.payload, "prompt": prompt})
        game = game_of(task)
        shown = Demonstration(task, seed=index).play()
        if not game.won(game.start) and shown.won and _EXAMPLE_COMMANDS[0] <= shown.commands <= _EXAMPLE_COMMANDS[1]:
            said = [message["content"] for message in shown.messages[1::2]]
            answers = [*(message["content"] for message in shown.messages[2::2]), shown.closing]
            targets.add(household.target)
            opening = game.intro.removeprefix(BANNER)
            found.append(prompts.example(len(found) + 1, opening, list(zip(said, answers, strict=True))))
    return ""
