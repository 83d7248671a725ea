"""Presents a game to a model and parses the model's answers, in one of three common prompt formats.

* ``plain``: the model sees the game's text and answers with a command.
* ``react`` (Yao et al., 2023): each answer is a command or a thought. A thought, "think: ...", takes a turn and gets
  the observation "OK.". Only the first line of an answer is read, and examples stand before the game.
* ``admissible``: every observation lists the admissible commands, and an answer has the form
  ``<think>...</think><action>...</action>`` (as in the ALFWorld environment of verl-agent; Feng et al., 2025).

In all formats, the observation after a text that is not an admissible command is the engine's "Nothing happens.".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gleanrl.environments.alfworld.expert import Expert
from gleanrl.rollout.thinking import answer_of

PROMPTS = ("plain", "react", "admissible")
THOUGHT_ANSWER = "OK."
_THINK = "think:"
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_STATES = {"heat": "hot", "cool": "cold", "clean": "clean"}


@dataclass(frozen=True, slots=True)
class Said:
    """A parsed answer of a model, which is a command or a thought.

    If the answer does not have the right format, ``command`` is empty and ``thought`` is False.
    """

    command: str = ""
    thought: bool = False


def read(prompt: str, content: str) -> Said:
    """Parse ``content``, a model's answer in the prompt format ``prompt``. Commands become lower case, as in the games.

    The thinking of a reasoning model is removed first, except in ``admissible``, where only the text between the action
    tags is read.
    """
    if prompt == "plain":
        return Said(answer_of(content).strip().lower())
    if prompt == "react":
        lines = [line.lstrip(" >\t").strip().lower() for line in answer_of(content).splitlines()]
        line = next(filter(None, lines), "")
        return Said(thought=True) if line.startswith(_THINK) else Said(line)
    found = _ACTION.search(content)
    return Said(" ".join(found[1].lower().split())) if found else Said()


def write_opening(prompt: str, text: str, examples: str, admissible: Sequence[str]) -> str:
    """Return the text of an episode's first message, which ends with the game's opening ``text``.

    Except in ``plain``, instructions on how to answer precede it, and the examples if there are any.
    """
    if prompt == "plain":
        return text
    parts = [_INSTRUCTIONS[prompt]]
    if examples:
        parts += [examples, "Now your own task."]
    return "\n\n".join([*parts, show_answer(prompt, text, admissible)])


def show_answer(prompt: str, text: str, admissible: Sequence[str]) -> str:
    """Return the game's answer ``text`` as the model sees it: in the format ``admissible``, with a list of the
    commands.
    """
    if prompt != "admissible":
        return text
    return "\n".join([text, "", "Possible actions:", *(f"- {command}" for command in admissible if command != "help")])


def write_command(prompt: str, command: str, thought: str = "") -> str:
    """Return the answer of a model that gives ``command``, in the format ``prompt``. Only ``admissible`` includes
    ``thought``.
    """
    if prompt == "admissible":
        return f"<think>{thought}</think>\n<action>{command}</action>"
    return f"> {command}" if prompt == "react" else command


def write_thought(thought: str) -> str:
    """Return the answer of a model that states a thought and gives no command, in the format ``react``."""
    return f"> {_THINK} {thought}"


_INSTRUCTIONS = {
    "react": (
        "You are in a household and have a task. Each of your answers is one line: a command, or a thought that "
        'starts with "think:" and is answered "OK.".'
    ),
    "admissible": (
        "You are in a household and have a task. After every observation, think about what to do next between <think> "
        "and </think>, then give one of the possible actions between <action> and </action>."
    ),
}


@dataclass
class Narrator:
    """Words the thoughts that accompany an expert's commands in demonstrations, based on the expert's state."""

    expert: Expert
    stage: str = ""

    def thoughts(self, command: str) -> Iterator[str]:
        """Yield the thoughts that precede ``command`` in the format ``react``.

        They are a plan before the first command, and later a reason whenever a new stage of the game begins.
        """
        stage, text = self.explain(command)
        if not self.stage:
            yield self._plan()
        elif stage != self.stage and text:
            yield text
        self.stage = stage

    def _plan(self) -> str:
        order = self.expert.order
        if order.kind == "examine":
            return (
                f"I have to look at a {order.target} by the light of a {order.destination}. "
                f"First I find a {order.target}, then the {order.destination}, and switch it on."
            )
        two = order.kind == "put_two"
        steps = ["find two of them, one after the other" if two else "find one"]
        if order.kind in _STATES:
            steps.append(f"{order.kind} it with the {self.expert.tool}")
        steps.append(f"bring {'each' if two else 'it'} to a {order.destination}")
        return f"This is about a {order.target}. I {', then '.join(steps)}."

    def explain(self, command: str) -> tuple[str, str]:
        """Return the stage of the game that ``command`` belongs to, such as "search" or "deliver", and the reason for
        the command.
        """
        expert, order = self.expert, self.expert.order
        verb, holding = command.split()[0], expert.holding
        place = command.rpartition(" from ")[2].rpartition(" to ")[2].removeprefix("open ").removeprefix("examine ")
        if verb == "take":
            return "take", f"Here is the {command[5:].partition(' from ')[0]}. I take it."
        if verb == "use":
            return "use", f"The {order.destination} is here, and I hold the {holding}. I switch it on."
        if not holding:
            return "search", f"I still need a {order.target}. I look at {place}."
        if not holding.startswith(f"{order.target} "):
            return "rid", f"I do not need the {holding}. I put it down."
        if order.kind == "examine":
            return "lamp", f"I hold the {holding}. Now I need a {order.destination}."
        if not expert.ready(holding):
            return "process", f"The {holding} is not {_STATES[order.kind]} yet. For that I need the {expert.tool}."
        ready = f"The {holding} is {_STATES[order.kind]} now." if order.kind in _STATES else f"I hold the {holding}."
        return "deliver", f"{ready} It belongs to {expert.goal_place or order.destination}."
