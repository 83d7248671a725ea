"""Plays episodes on the original ALFWorld engine and compares them with Glean RL's engine.

The original engine is TextWorld's `PddlEnv` with alfworld's `AlfredDemangler`, as alfworld itself uses it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

from gleanrl.environments.alfworld.engine import Game, package_texts
from gleanrl.environments.alfworld.expert import Expert, make_expert
from gleanrl.types import Task

NONSENSE = ("", "look around", "take fridge 1 from fridge 1", "go to", "open mug 1", "GO TO x", "{r}", "#look#")


class Move(NamedTuple):
    command: str
    feedback: str
    won: bool
    admissible: tuple[str, ...]


def game_file(task: Task, path: Path) -> Path:
    """Write a generated household as a game file in the format of the published ALFWorld games."""
    domain, grammar = package_texts()
    text = grammar.replace("UNKNOWN GOAL", task.payload["task"])
    game = {"pddl_domain": domain, "grammar": text, "pddl_problem": task.payload["problem"], "solvable": True}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(game))
    return path


def start(path: Path) -> Any:
    infos = textworld.EnvInfos(won=True, feedback=True, admissible_commands=True)
    return textworld.start(str(path), infos, wrappers=[AlfredDemangler()])


class Episode(NamedTuple):
    moves: list[Move]
    seconds: float  # CPU seconds that the engine's steps took in all


def play(env: Any, seed: int, steps: int, script: Sequence[str] = ()) -> Episode:
    """Play an episode on the original engine.

    The commands of ``script`` come first. The later commands are the expert's, mixed with random valid commands,
    commands that were valid in earlier states, and nonsense.
    """
    rng = random.Random(seed)
    state = env.reset()
    moves = [_move("", state)]
    expert = make_expert(state.feedback, state.feedback.rpartition("Your task is to: ")[2], seed)
    assert expert is not None
    ever: list[str] = []
    seconds = 0.0
    for step in range(steps):
        ever += moves[-1].admissible
        command = script[step] if step < len(script) else _command(rng, expert, moves[-1].admissible, ever)
        began = time.process_time()
        state, _, _ = env.step(command)
        seconds += time.process_time() - began
        moves.append(_move(command, state))
        expert.observe(command, state.feedback)
    return Episode(moves, seconds)


def _move(command: str, state: Any) -> Move:
    return Move(command, state.feedback, bool(state["won"]), tuple(state["admissible_commands"]))


def _command(rng: random.Random, expert: Expert, admissible: Sequence[str], ever: Sequence[str]) -> str:
    draw = rng.random()
    if draw < 0.45:
        return expert.act()
    # The verb is drawn first, because most admissible commands are "go to".
    if draw < 0.82:
        verb = rng.choice(sorted({command.split()[0] for command in admissible}))
        return rng.choice([command for command in admissible if command.split()[0] == verb])
    return rng.choice(ever) if draw < 0.94 else rng.choice(NONSENSE)


def differences(game: Game, episodes: list[list[Move]], order: list[int]) -> list[str]:
    """Replay recorded episodes on Glean RL's engine and describe every difference from the original engine.

    ``order`` gives the index of the episode whose move is replayed next, so that episodes can be interleaved.
    """
    states = [game.start] * len(episodes)
    at = [0] * len(episodes)
    found: list[str] = []
    for episode in order:
        move = episodes[episode][at[episode]]
        if at[episode] == 0:
            ours = (game.intro, game.won(game.start))
        else:
            feedback, states[episode], won = game.step(states[episode], move.command)
            ours = (feedback, won)
        at[episode] += 1
        if ours != (move.feedback, move.won):
            found.append(f"{move.command!r}: stock {(move.feedback, move.won)}, ours {ours}")
        if game.admissible(states[episode]) != move.admissible:
            both = set(game.admissible(states[episode])) ^ set(move.admissible)
            found.append(f"after {move.command!r}: admissible differ in {sorted(both)}")
    return found
