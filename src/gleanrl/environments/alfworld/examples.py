"""Few-shot examples: short games of the warm-start split, played by the expert, as text."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import count as count_from

from gleanrl.environments.alfworld import prompts
from gleanrl.environments.alfworld.engine import BANNER
from gleanrl.environments.alfworld.episode import Demonstration
from gleanrl.environments.alfworld.games import game_of, household_task
from gleanrl.environments.alfworld.households import Layout, draw
from gleanrl.environments.alfworld.parts import layout_seen, split_of
from gleanrl.utils.seeding import derive

_COMMANDS = (4, 16)  # of the expert; a longer search teaches nothing more and costs context


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
        if not game.won(game.start) and shown.won and _COMMANDS[0] <= shown.commands <= _COMMANDS[1]:
            said = [message["content"] for message in shown.messages[1::2]]
            answers = [*(message["content"] for message in shown.messages[2::2]), shown.closing]
            targets.add(household.target)
            opening = game.intro.removeprefix(BANNER)
            found.append(prompts.example(len(found) + 1, opening, list(zip(said, answers, strict=True))))
    return ""
