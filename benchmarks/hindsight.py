"""Hindsight with proof: failures of ALFWorld as successes of the goals that they reached instead.

`atlas_arms.py` names `Hindsight` and `WrongGoals` by path. Sources: hindsight experience replay (HER, arXiv
1707.01495) and hindsight instruction replay (HiR, arXiv 2512.23457).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from atlas_curricula import ChangedSuccesses
from gleanrl.environments.alfworld.games import game_of, generated_task
from gleanrl.environments.alfworld.households import GOALS, LAMP, goal_library
from gleanrl.experience.replay.recall import Disagrees
from gleanrl.experience.replay.reverify import replay_actions
from gleanrl.experience.replay.updates import ReplayedSuccess, replayed_group
from gleanrl.protocols import Metrics
from gleanrl.train import Run
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn

SHARE = 4  # an extra update has at most one relabelled failure for so many trajectories
MEMORY = 0.9  # with each further step, the weight of earlier steps in the solve rate of a kind shrinks by this factor
_THING = r"([a-z]+) \d+"
_MOVED = re.compile(rf"move {_THING} to {_THING}")
_LIT = re.compile(rf"use {_THING}")
_TOOK = re.compile(rf"take {_THING} from {_THING}")


def proposed(commands: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield goals that ``commands`` may have reached: kind, object and receptacle.

    Each move of an object may have reached all kinds of goals that bring it there, and switching on a lamp may have
    shown the object that was taken last.
    """
    held = ""
    for command in commands:
        if took := _TOOK.fullmatch(command):
            held = took[1]
        elif moved := _MOVED.fullmatch(command):
            for kind in GOALS:
                if kind != "examine":
                    yield kind, moved[1], moved[2]
        elif (lit := _LIT.fullmatch(command)) and held and lit[1] == LAMP.lower():
            yield "examine", held, ""


def _kinds(task: Task, what: str) -> dict[str, str]:
    """Return the kinds of things in the household, in lower case -> as the problem names them.

    ``what`` is "object" or "receptacle".
    """
    return {name.lower(): name for name in re.findall(rf"\({what}Type \S+ (\w+)Type\)", task.payload["problem"])}


def with_goal(task: Task, kind: str, target: str, destination: str) -> Task | None:
    """Return the task of the same household with another goal, or None if the household has no such things."""
    problem = task.payload["problem"]
    targets, places = _kinds(task, "object"), _kinds(task, "receptacle")
    if target not in targets or (destination and destination not in places):
        return None
    text = goal_library()[GOALS[kind].library]
    goal = text["pddl"].replace("#", "-")
    goal = goal.format(obj=targets[target], recep=places.get(destination, ""), toggle=LAMP)
    payload = {
        **task.payload,
        "problem": problem[: problem.index("(:goal")] + " ".join(goal.split()),
        "task": text["templates"][0].format(obj=target, recep=destination, toggle=LAMP.lower()),
        **{"goal": kind, "target": target, "destination": destination},
    }
    return generated_task(payload)


def achieved(task: Task, commands: Sequence[str]) -> list[tuple[int, Task]]:
    """Return the goals that are true after some of ``commands`` and were false before the first one.

    They are goals of ALFWorld's own grammar, each with the number of commands after which it is true for the first
    time. The engine decides what is true. The goal of ``task`` itself is left out.
    """
    found: list[tuple[int, Task]] = []
    own = (task.payload["goal"], task.payload["target"], task.payload["destination"])
    for goal in dict.fromkeys(proposed(commands)):
        other = None if goal == own else with_goal(task, *goal)
        if other is not None and (count := reached(other, commands)):
            found.append((count, other))
    return found


def reached(task: Task, commands: Sequence[str]) -> int:
    """Return the number of commands after which the goal is reached for the first time.

    It is 0 if the goal is never reached, or if it is true at the start.
    """
    game = game_of(task)
    state = game.start
    if game.won(state):
        return 0
    for count, command in enumerate(commands, 1):
        state = game.step(state, command).state
        if game.won(state):
            return count
    return 0


def _true_at_start(task: Task) -> bool:
    game = game_of(task)
    return bool(game.won(game.start))


class Hindsight(ChangedSuccesses):
    """Adds failures of other goals to the extra updates of replay, as successes of the goals that they reached.

    A failure is cut where it reached a goal of `achieved`, and its first message is rendered with that goal. Its
    sampled tokens and recorded log-probs stay. It is kept if the environment of the new task, played again, gives it
    the score 1. A quarter of the trajectories of an extra update are such failures, drawn uniformly, with the advantage
    1 - solve rate of their kind of goal, which is 1 for kinds that the run does not play. The newest of each new task
    is kept for the rest of the run.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        self._player = run.player
        self._failures: list[tuple[Task, Trajectory]] = []  # of the last step
        self.kept: dict[str, tuple[Task, Trajectory]] = {}
        self.counts: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()

    def goals(self, task: Task, commands: Sequence[str]) -> list[tuple[str, int, Task]]:
        """Return for each goal of `achieved` the id of its task, the number of commands, and the task to train on."""
        return [(other.id, turns, other) for turns, other in achieved(task, commands)]

    async def proved(self, task: Task, trajectory: Trajectory) -> bool:
        """Return whether the environment of ``task`` gives the actions of ``trajectory`` the score 1."""
        try:
            score = await replay_actions(self._player.environment(task), self._player.renderer, trajectory)
        except Disagrees:
            return False
        return score.valid and score.value == 1.0

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        metrics = dict(super().observe(groups, training))
        for counts in (self._solved, self._tried):
            for kind in counts:
                counts[kind] *= MEMORY  # type: ignore[assignment]
        for group in groups:
            kind = group.spec.task.kind
            for member in group.valid_fresh:
                solved = member.score.reaches(1.0)
                self._tried[kind] += 1
                self._solved[kind] += solved
                if not solved and len(member.segments) == 1:
                    self._failures.append((group.spec.task, member))
        return metrics | {f"hindsight/{name}": float(count) for name, count in self.counts.items()}

    async def propose(self, count: int) -> list[GroupSpec]:
        failures, self._failures = self._failures, []
        for task, failure in failures:
            commands = [str(turn.message["content"]).strip() for turn in failure.sampled_turns()]
            for name, turns, other in self.goals(task, commands):
                relabelled = await self.relabelled(task, failure, turns, other)
                self.counts["relabelled"] += 1
                if await self.proved(other, relabelled):
                    self.counts["kept"] += 1
                    self.kept[name] = (other, relabelled)
        return await super().propose(count)

    async def relabelled(self, task: Task, failure: Trajectory, turns: int, other: Task) -> Trajectory:
        """Return the first ``turns`` sampled turns of ``failure`` as a success of ``other``."""
        [segment] = failure.segments
        places = [place for place, turn in enumerate(segment) if turn.sampled]
        before, after = await self._opening(task), await self._opening(other)
        shown = np.concatenate([turn.tokens for turn in before])
        recorded = np.concatenate([turn.tokens for turn in segment[: places[0]]])
        if not np.array_equal(shown, recorded):
            raise ValueError(f"the first message of {task.id} is not the one that trajectory {failure.id} begins with")
        segment = (*after, *segment[places[0] : places[turns - 1] + 1])
        return replace(
            failure,
            **{"id": f"{failure.id}-as-{other.id}", "task_id": other.id, "segments": (segment,)},
            **{"score": Score(1.0), "stop": StopReason.DONE, "ending": ()},
        )

    async def _opening(self, task: Task) -> list[Turn]:
        environment = self._player.environment(task)
        try:
            return self._player.renderer.start((await environment.reset()).messages)
        finally:
            await environment.close()

    async def choose(self, random: np.random.Generator, step: int) -> list[ReplayedSuccess]:
        """Return the successes of an extra update, of which up to a quarter are replaced by relabelled failures."""
        chosen = await self._choose(random, step)
        relabelled = list(self.kept.values())
        drawn = random.permutation(len(relabelled))[: len(chosen) // SHARE]
        # ``chosen`` is ordered by solve rate, so the places are random too.
        for place, index in zip(random.permutation(len(chosen)), drawn, strict=False):
            task, trajectory = relabelled[index]
            rate = self._solved[task.kind] / self._tried[task.kind] if self._tried[task.kind] else 0.0
            age = max(step - trajectory.version, 0)
            chosen[place] = ReplayedSuccess(replayed_group(task, [trajectory]), 1 - rate, age)
            self.counts["trained"] += 1
        return chosen


class WrongGoals(Hindsight):
    """A control: the failures of `Hindsight`, with other goals of the same kinds, which they have not reached.

    Each goal of `achieved` is replaced by one with another object or receptacle of the household, drawn at random, that
    is false from the start to the end. The newest failure of each achieved goal is kept, as in `Hindsight`.
    """

    def goals(self, task: Task, commands: Sequence[str]) -> list[tuple[str, int, Task]]:
        found = [(other.id, turns, self._wrong(other, commands)) for turns, other in achieved(task, commands)]
        return [(name, turns, wrong) for name, turns, wrong in found if wrong is not None]

    def _wrong(self, task: Task, commands: Sequence[str]) -> Task | None:
        kind, places = task.payload["goal"], [""]
        if task.payload["destination"]:
            places = sorted(_kinds(task, "receptacle"))
        goals = [(target, place) for target in sorted(_kinds(task, "object")) for place in places]
        for index in self._random.permutation(len(goals)):
            other = with_goal(task, kind, *goals[index])
            if other is not None and not reached(other, commands) and not _true_at_start(other):
                return other
        return None

    async def proved(self, task: Task, trajectory: Trajectory) -> bool:
        return True
