"""An expert that sees only text. It searches for the object, takes it, processes it and delivers it.

The expert reacts to the answers that it reads, so it recovers from random commands in between.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from gleanrl.environments.alfworld.households import GOALS, goal_library, thor

_THING = r"[a-z]+ \d+"
_TOOL = {kind: goal.tool.lower() for kind, goal in GOALS.items() if goal.tool}


@dataclass(frozen=True, slots=True)
class Order:
    """A goal as read from its text: the kind of goal, the object, and where to bring it (for examine, the lamp)."""

    kind: str
    target: str
    destination: str


def read_order(task: str) -> Order | None:
    """Read a goal that is worded by one of the real games' templates. Returns None if it is worded freely."""
    for kind, goal in GOALS.items():
        for template in goal_library()[goal.library]["templates"]:
            pattern = re.escape(template).replace(r"\{obj\}", "([a-z]+)")
            pattern = pattern.replace(r"\{recep\}", "([a-z]+)").replace(r"\{toggle\}", "([a-z]+)")
            found = re.fullmatch(pattern, task.strip().rstrip("."))
            if found:
                return Order(kind, found[1], found[2])
    return None


@dataclass
class Expert:
    """Plays one game (see `make_expert`). `observe` reads every command and answer, `act` returns the next command."""

    order: Order
    receptacles: list[str]
    rng: random.Random
    here: str = ""
    holding: str = ""
    closed: set[str] = field(default_factory=set)
    contents: dict[str, list[str]] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)  # object -> how it was processed last
    refused: set[tuple[str, str]] = field(default_factory=set)  # (object, receptacle that did not accept it)
    goal_place: str = ""

    # --- what the expert knows ----------------------------------------------------------------
    def observe(self, command: str, answer: str) -> None:
        """Learn from the answer to a command, which may be the expert's own or a random one."""
        if answer.startswith("Nothing happens"):
            moved = re.fullmatch(rf"move ({_THING}) to ({_THING})", command)
            if moved and moved[2] == self.here and moved[1] == self.holding:
                self.refused.add((moved[1], moved[2]))
            destination = command.removeprefix("go to ")
            # The command fails if the expert is already there, as two receptacles may share a place.
            if destination in self.receptacles:
                self.here = destination
            return
        arrived = re.match(rf"You arrive at ({_THING})\.", answer)
        if arrived:
            self.here = arrived[1]
        for place in re.findall(rf"The ({_THING}) is closed", answer):
            self.closed.add(place)
        seen = re.search(rf"(?:The ({_THING}) is open\. In it|On the ({_THING})), you see (.*?)\.", answer)
        if seen:
            place = seen[1] or seen[2]
            self.closed.discard(place)
            self.contents[place] = re.findall(rf"an? ({_THING})", seen[3])
        closed = re.match(rf"You close the ({_THING})\.", answer)
        if closed:
            self.closed.add(closed[1])
        taken = re.match(rf"You pick up the ({_THING}) from the ({_THING})\.", answer)
        if taken:
            self.holding = taken[1]
            inside = self.contents.setdefault(taken[2], [])
            if taken[1] in inside:
                inside.remove(taken[1])
        put = re.match(rf"You move the ({_THING}) to the ({_THING})\.", answer)
        if put:
            self.holding = ""
            self.contents.setdefault(put[2], []).append(put[1])
        done = re.match(rf"You (heat|cool|clean) the ({_THING}) using", answer)
        if done:
            process, thing = done[1], done[2]
            if process == self.order.kind:
                self.state[thing] = process
            elif {process, self.order.kind} == {"heat", "cool"}:  # heating undoes cooling, and cooling undoes heating
                self.state[thing] = ""

    # --- what the expert does -------------------------------------------------------------------
    def act(self) -> str:
        """Return the next command."""
        if self.holding and not self._wanted(self.holding):  # put it down, here if possible
            places = [self.here, *self.receptacles] if self.here else self.receptacles
            place = next((p for p in places if (self.holding, p) not in self.refused), "")
            return (self._reach(place) or f"move {self.holding} to {place}") if place else "inventory"
        if not self.holding:
            for place, things in self.contents.items():
                for thing in things:
                    if self._wanted(thing) and not (place == self.goal_place and self.ready(thing)):
                        return self._reach(place) or f"take {thing} from {place}"
            return self._search()
        if self.order.kind == "examine":
            for place, things in self.contents.items():
                lamp = next((thing for thing in things if thing.split()[0] == self.order.destination), None)
                if lamp:
                    return self._reach(place) or f"use {lamp}"
            return self._search()
        if not self.ready(self.holding):
            tool = self.tool
            if not tool:
                return "look"
            return f"go to {tool}" if self.here != tool else f"{self.order.kind} {self.holding} with {tool}"
        if not self.goal_place:
            places = [r for r in self.receptacles if r.split()[0] == self.order.destination]
            if not places:
                return "look"
            self.goal_place = self.here if self.here in places else self.rng.choice(places)
        return self._reach(self.goal_place) or f"move {self.holding} to {self.goal_place}"

    def _wanted(self, thing: str) -> bool:
        return thing.split()[0] == self.order.target

    def ready(self, thing: str) -> bool:
        """Return whether a thing is processed as ordered and only needs to be delivered."""
        return self.order.kind not in _TOOL or self.state.get(thing) == self.order.kind

    @property
    def tool(self) -> str:
        """The first receptacle that can process an object as ordered; empty if there is none."""
        return next((r for r in self.receptacles if r.split()[0] == _TOOL.get(self.order.kind)), "")

    def _search(self) -> str:
        unseen = [place for place in self.receptacles if place not in self.contents]
        if not unseen:
            return "look"
        place = self.here if self.here in unseen else unseen[0]
        return self._reach(place) or f"examine {place}"

    def _reach(self, place: str) -> str:
        """Return the next command to reach and open ``place``; empty if the expert is there and the place is open."""
        if self.here != place:
            return f"go to {place}"
        return f"open {place}" if place in self.closed else ""


def make_expert(intro: str, task: str, seed: int, *, otherwise: Order | None = None) -> Expert | None:
    """Make an expert for the game that opens with ``intro``.

    If the goal in ``task`` is worded freely, the expert follows ``otherwise``. Returns None if that is None too.
    """
    order = read_order(task) or otherwise
    if order is None:
        return None
    described = intro.split("you see", 1)[-1].split("Your task is to", 1)[0]
    receptacles = re.findall(rf"an? ({_THING})", described)
    rng = random.Random(seed)
    rng.shuffle(receptacles)
    fitting: set[str] = set()  # kinds of receptacles that can hold the target
    for receptacle, objects in thor().VAL_RECEPTACLE_OBJECTS.items():
        if order.target in {kind.lower() for kind in objects}:
            fitting.add(receptacle.lower())
    receptacles.sort(key=lambda receptacle: receptacle.split()[0] not in fitting)  # unlikely places last
    return Expert(order, receptacles, rng)
