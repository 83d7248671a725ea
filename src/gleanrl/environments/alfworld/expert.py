"""A scripted expert for ALFWorld games that sees only the game's text.

It searches the household for an object of the required kind, takes it, processes it if the goal says so (heat, cool,
clean) and brings it to its destination. The expert chooses each command from what it has read so far, so it can
continue after random commands.
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
    """The content of a goal's text, in lower case.

    ``kind`` is a key of `GOALS`, ``target`` the kind of object, and ``destination`` the kind of receptacle that it is
    brought to. For the goal ``examine``, ``destination`` is the kind of lamp to switch on.
    """

    kind: str
    target: str
    destination: str


def read_order(task: str) -> Order | None:
    """Parse the text of a goal. Returns None if it matches none of alfworld's templates.

    Some of ALFWorld's own games state the goal in a person's words, which match no template.
    """
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
    """An expert in the course of one game, made by `make_expert`.

    Alternately call `act`, which returns the next command, and `observe` with the command that was played and the
    game's answer.
    """

    order: Order
    receptacles: list[str]
    rng: random.Random
    here: str = ""
    holding: str = ""
    closed: set[str] = field(default_factory=set)
    contents: dict[str, list[str]] = field(default_factory=dict)
    state: dict[str, str] = field(
        default_factory=dict
    )  # object -> the goal's process, such as "heat", if done; "" if undone since
    refused: set[tuple[str, str]] = field(default_factory=set)  # (object, receptacle that did not accept it)
    goal_place: str = ""

    # --- reading the game's answers -------------------------------------------------------------
    def observe(self, command: str, answer: str) -> None:
        """Update the expert's knowledge from the game's ``answer`` to ``command``, which may be a random one."""
        if answer.startswith("Nothing happens"):
            moved = re.fullmatch(rf"move ({_THING}) to ({_THING})", command)
            if moved and moved[2] == self.here and moved[1] == self.holding:
                self.refused.add((moved[1], moved[2]))
            destination = command.removeprefix("go to ")
            # "go to" fails if the expert already stands where the receptacle is, since two receptacles may share a
            # location. The expert can then use the receptacle.
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

    # --- choosing commands ----------------------------------------------------------------------
    def act(self) -> str:
        """Return the next command, chosen from what the expert has read so far."""
        # A random command may have taken an object that the goal does not need. Put it down, here if possible.
        if self.holding and not self._wanted(self.holding):
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
        """Return whether ``thing`` needs no further processing before it is delivered.

        That is so if it has been heated, cooled or cleaned as the goal says, or if the goal asks for none of these.
        """
        return self.order.kind not in _TOOL or self.state.get(thing) == self.order.kind

    @property
    def tool(self) -> str:
        """The receptacle that can heat, cool or clean as the goal asks. Empty if there is none, or the goal asks for
        none.
        """
        return next((r for r in self.receptacles if r.split()[0] == _TOOL.get(self.order.kind)), "")

    def _search(self) -> str:
        unseen = [place for place in self.receptacles if place not in self.contents]
        if not unseen:
            return "look"
        place = self.here if self.here in unseen else unseen[0]
        return self._reach(place) or f"examine {place}"

    def _reach(self, place: str) -> str:
        """Return the next command that is needed to get to the receptacle ``place`` and to open it.

        The result is empty if the expert stands there and the receptacle is open.
        """
        if self.here != place:
            return f"go to {place}"
        return f"open {place}" if place in self.closed else ""


def make_expert(intro: str, task: str, seed: int, *, otherwise: Order | None = None) -> Expert | None:
    """Return an expert for the game whose opening text is ``intro`` and whose goal is stated by ``task``.

    It searches the receptacles in a random order given by ``seed``, those that can hold the target first. If ``task``
    matches none of alfworld's templates, the goal is ``otherwise``. Returns None if that is None too.
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
    receptacles.sort(key=lambda receptacle: receptacle.split()[0] not in fitting)  # the others are searched last
    return Expert(order, receptacles, rng)
