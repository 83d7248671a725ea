"""An example environment: a walk to a treasure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.seeding import derive

MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


@dataclass(frozen=True)
class TreasureTaskset(Taskset):
    """Walk to a treasure. The fields are the options of [environment.options]."""

    far: int = 5
    seed: int = 0

    has_expert = True  # it implements demonstrate

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        share = {"train": range(6), "warm_start": (6, 7), "eval": (8, 9)}[split]  # of ten: no place is in two
        side = range(-self.far, self.far + 1)
        places = [(x, y) for x in side for y in side if (x or y) and derive(0, x, y) % 10 in share]
        places.sort(key=lambda place: derive(self.seed, *place))
        return [Task(f"treasure-{x}-{y}", payload={"x": x, "y": y}) for x, y in places[:count]]

    def environment(self, task: Task) -> "Walk":
        return Walk(task.payload["x"], task.payload["y"])

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        walk, talk = self.environment(task), []
        while walk.x or walk.y:
            move = next(name for name, (dx, dy) in MOVES.items() if dx * walk.x > 0 or dy * walk.y > 0)
            talk += [walk.where(), Message(role="assistant", content=move)]
            walk.go(move)
        return tuple(talk), Score(1.0)


class Walk(Environment):
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y, self.left = x, y, abs(x) + abs(y) + 2  # steps; two may be wrong

    def where(self) -> Message:
        return Message(role="user", content=f"The treasure is {self.y} north and {self.x} east of you.")

    def go(self, move: str) -> None:
        east, north = MOVES.get(move, (0, 0))
        self.x, self.y, self.left = self.x - east, self.y - north, self.left - 1

    async def reset(self) -> Observation:
        return Observation((self.where(),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        self.go(message["content"].strip())
        found = (self.x, self.y) == (0, 0)
        return Observation((self.where(),), done=found or not self.left, score=Score(float(found)))
