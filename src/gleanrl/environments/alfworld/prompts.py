"""How a game is shown to a model and how its answers are read: three formats of common practice.

``plain``: the game's text, answered with a command. ``react``: reasoning and commands take turns (Yao et al., 2023):
"think: ..." is answered "OK." and costs a turn, only the first line of an answer counts, and examples stand before the
game. ``admissible``: every observation lists the commands that would do something, and an answer is
``<think>...</think><action>...</action>`` (as in the ALFWorld of verl-agent; Feng et al., 2025).

In all of them, an answer that is not a command of the game is answered as by the engine: "Nothing happens.".
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
    """An answer as read: a command, or a thought, or (both empty) nothing that the format allows."""

    command: str = ""
    thought: bool = False


def read(prompt: str, content: str) -> Said:
    """Read a model's answer in a format; commands are lower-cased, as the games' are. The thinking of a reasoning model
    is read in ``admissible`` only, which has a place for it."""
    if prompt == "plain":
        return Said(answer_of(content).strip().lower())
    if prompt == "react":
        lines = [line.lstrip(" >\t").strip().lower() for line in answer_of(content).splitlines()]
        line = next(filter(None, lines), "")
        return Said(thought=True) if line.startswith(_THINK) else Said(line)
    found = _ACTION.search(content)
    return Said(" ".join(found[1].lower().split())) if found else Said()


def write_opening(prompt: str, text: str, examples: str, admissible: Sequence[str]) -> str:
    """The first message: what to do and how to answer, examples where there are any, and the game's opening."""
    if prompt == "plain":
        return text
    parts = [_INSTRUCTIONS[prompt]]
    if examples:
        parts += [examples, "Now your own task."]
    return "\n\n".join([*parts, show_answer(prompt, text, admissible)])


def show_answer(prompt: str, text: str, admissible: Sequence[str]) -> str:
    """The game's answer as the model sees it."""
    if prompt != "admissible":
        return text
    return "\n".join([text, "", "Possible actions:", *(f"- {command}" for command in admissible if command != "help")])


def write_command(prompt: str, command: str, thought: str = "") -> str:
    """A command, with a thought where the format has a place for it, as a model would say it."""
    if prompt == "admissible":
        return f"<think>{thought}</think>\n<action>{command}</action>"
    return f"> {command}" if prompt == "react" else command


def write_thought(thought: str) -> str:
    """Format a thought that the model says in a turn without a command (format ``react``)."""
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
    """Gives reasons for an expert's commands, from the expert's own state."""

    expert: Expert
    stage: str = ""

    def thoughts(self, command: str) -> Iterator[str]:
        """New thoughts before ``command``: a plan first, then what changed."""
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
        """The stage that a command belongs to, and the reason for it."""
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
