"""Plays games in the prompt format of their tasks.

In `AlfworldEnvironment` a model plays, and in `Demonstration` the expert. `play_examples` returns the text of games
that the expert has played, which a ``react`` prompt contains as examples.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count as count_from
from typing import Any

from gleanrl.environments.alfworld import prompts
from gleanrl.environments.alfworld.engine import BANNER, NOTHING, Game
from gleanrl.environments.alfworld.expert import Order, make_expert
from gleanrl.environments.alfworld.games import game_of, household_task
from gleanrl.environments.alfworld.households import Layout, draw, layout_seen, split_of
from gleanrl.protocols import Environment, Observation
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.seeding import derive

EXPERT_STEPS = 100  # limit on the expert's commands in households with up to 25 receptacles
_EXAMPLE_COMMANDS = (4, 16)  # least and most commands in an example; longer ones teach no more and use up context


class AlfworldEnvironment(Environment):
    """An environment that plays one game: messages are commands, and observations are the game's answers.

    The score is 1 if the goal has been reached, else 0. Except in the format ``plain``, its part ``valid_actions`` is
    the share of the turns so far that were thoughts or commands that the game accepted.

    The ``info`` of an observation contains ``won``, ``valid_action`` (whether the game accepted the last command; true
    for thoughts and after `reset`) and, if ``admissible_commands`` is set, the list of these commands.
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
        return self._observe(game, open_episode(self._task, game, banner=self._banner), won=False)

    async def step(self, message: Message) -> Observation:
        if self._game is None:
            raise RuntimeError("step before reset, or after close")
        answer_read = prompts.read(self._prompt, message["content"])
        self._turns += 1
        if answer_read.thought:
            self._valid += 1
            return self._observe(self._game, prompts.THOUGHT_ANSWER, won=False)
        answer, self._state, won = self._game.step(self._state, answer_read.command)
        self._valid += answer != NOTHING
        offered = self._game.admissible(self._state) if self._prompt == "admissible" else ()
        text = prompts.show_answer(self._prompt, answer, offered)
        return self._observe(self._game, text, won=won, valid=answer != NOTHING)

    async def close(self) -> None:
        self._game = None

    def _observe(self, game: Game, text: str, *, won: bool, valid: bool = True) -> Observation:
        info: dict[str, Any] = {"won": won, "valid_action": valid}
        if self._list_admissible:
            info["admissible_commands"] = game.admissible(self._state)
        parts = {} if self._prompt == "plain" or not self._turns else {"valid_actions": self._valid / self._turns}
        score = Score(float(won), parts=parts)
        state = hashlib.blake2b(b"%x" % self._state, digest_size=12).hexdigest()
        return Observation(({"role": "user", "content": text},), done=won, score=score, state=state, info=info)


def open_episode(task: Task, game: Game, *, banner: bool) -> str:
    """Return the text of an episode's first message. ``banner`` keeps TextWorld's welcome line."""
    prompt = task.payload.get("prompt", "plain")
    offered = game.admissible(game.start) if prompt == "admissible" else ()
    text = game.intro if banner else game.intro.removeprefix(BANNER)
    return prompts.write_opening(prompt, text, task.payload.get("examples", ""), offered)


@dataclass
class Demonstration:
    """A game played by the expert: the conversation so far, and whether the expert has won. `play` fills it in."""

    task: Task
    seed: int
    banner: bool = False
    messages: list[Message] = field(default_factory=list)
    commands: int = 0
    last_answer: str = ""  # the game's answer to the last command; ``messages`` end with that command
    won: bool = False

    def play(self, noise: float = 0.0) -> Demonstration:
        """Let the expert play until it has won, and return this object.

        The expert stops after `EXPERT_STEPS` commands, or four for each receptacle if that is more, which is more than
        enough to search the whole household. With probability ``noise``, a random admissible command replaces the
        expert's next one.

        Raises:
            NoExpert: the goal can be read neither from the game's text nor from the task's payload.
        """
        task, payload = self.task, self.task.payload
        game, prompt = game_of(task), payload.get("prompt", "plain")
        # The goal according to the payload, for goals that were worded by a person and match no template.
        order = None
        if payload.get("target") and "goal" in payload:
            order = Order(payload["goal"], payload["target"], payload.get("destination") or "desklamp")
        expert = make_expert(game.intro, game.task, derive(self.seed, "alfworld", "expert", task.id), otherwise=order)
        if expert is None:
            raise NoExpert(f"the expert cannot read the goal {game.task!r} of task {task.id}; its wording is free")
        narrator = prompts.Narrator(expert)
        rng = random.Random(derive(self.seed, "alfworld", "noise", task.id))
        answer, state = open_episode(task, game, banner=self.banner), game.start
        for _ in range(max(EXPERT_STEPS, 4 * len(expert.receptacles))):
            command = expert.act()
            is_random = bool(noise) and rng.random() < noise
            reason = ""
            if is_random:
                command = rng.choice([c for c in game.admissible(state) if c != "help"])
                reason = "I try something else."
            elif prompt == "react":
                for thought in narrator.thoughts(command):
                    self._exchange(answer, prompts.write_thought(thought))
                    answer = prompts.THOUGHT_ANSWER
            elif prompt == "admissible":
                _, reason = narrator.explain(command)
            self._exchange(answer, prompts.write_command(prompt, command, reason))
            self.last_answer, state, self.won = game.step(state, command)
            self.commands += 1
            expert.observe(command, self.last_answer)
            if self.won:
                break
            offered = game.admissible(state) if prompt == "admissible" else ()
            answer = prompts.show_answer(prompt, self.last_answer, offered)
        return self

    def _exchange(self, answer: str, content: str) -> None:
        self.messages.append({"role": "user", "content": answer})
        self.messages.append({"role": "assistant", "content": content})


@lru_cache(maxsize=64)
def play_examples(prompt: str, goal: str, count: int) -> str:
    """Return ``count`` games with a goal of the kind ``goal`` as one text, each played by the expert until it has won.

    The text depends only on the arguments, so it is the same for every task and run. The games are generated households
    of the split ``warm_start``, and each has another target object.
    """
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
        fitting = _EXAMPLE_COMMANDS[0] <= shown.commands <= _EXAMPLE_COMMANDS[1]
        if shown.won and fitting and not game.won(game.start):
            targets.add(household.target)
            lines = [f"Example {len(found) + 1}:", game.intro.removeprefix(BANNER)]
            # The first message also contains the instructions, so `game.intro` replaces it.
            lines += [message["content"] for message in shown.messages[1:]]
            found.append("\n".join([*lines, shown.last_answer]))
    return ""
