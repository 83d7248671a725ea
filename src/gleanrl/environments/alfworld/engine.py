"""Runs ALFWorld games whose states are integers with one bit per fact, so that a step takes microseconds.

    game = Game(problem, task)
    feedback, state, won = game.step(game.start, "go to cabinet 1")

The rules come from the alfworld package's PDDL domain, and the texts from its grammar. A `Game` does not store the
state of an episode; the caller does. So any number of episodes can be played in turn in one process, and all episodes
of a game share its cached results.

For every command, feedback, win flag and admissible commands equal those of the stock engine (``textworld.start`` with
alfworld's demangler).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from gleanrl.environments.alfworld.pddl import Bits, Operator, World, read_domain
from gleanrl.environments.alfworld.text import Entity, Facts, Grammar, Scope

NOTHING = "Nothing happens."
BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
_GOAL = re.compile(r'(Your task is to: )((?:[^"\\]|\\.)*?)(\.?")')
_PLACEHOLDER = "UNKNOWN GOAL"
_MEMO_LIMIT = 4_000  # largest number of transitions cached per game, about 2 MB


class Transition(NamedTuple):
    feedback: str
    state: Bits
    won: bool


class Game:
    """A playable game, made from one PDDL problem.

    Args:
        problem: PDDL text of the household and its goal.
        task: the goal in words, as the game's opening states it; empty = the goal in ``grammar_text``.
        domain_text, grammar_text: the PDDL domain and the ``.twl2`` grammar; empty = those of the alfworld package.
    """

    def __init__(self, problem: str, task: str = "", domain_text: str = "", grammar_text: str = "") -> None:
        if not (domain_text and grammar_text):
            default_domain, default_grammar = package_texts()
            domain_text, grammar_text = domain_text or default_domain, grammar_text or default_grammar
        goal = _GOAL.search(grammar_text)
        self.task = task or (json.loads(f'"{goal[2]}"') if goal else "")
        self._grammar = _read_grammar(domain_text, _GOAL.sub(rf"\g<1>{_PLACEHOLDER}\g<3>", grammar_text))
        rules = read_domain(domain_text)
        self._world = World(rules, problem, self._grammar.predicates)
        self._facts = Facts(self._world)
        self._parameters = {
            action: tuple((name.lstrip("?"), kind) for name, kind in parameters)
            for action, parameters in rules.parameters.items()
        }
        # number of ground operators, to which the game's memory use is about proportional (see `GameCache`)
        self.operators = len(self._world.operators)
        names = demangle(self._world.objects)
        self._entities = {thing: Entity(thing, kind, names[thing]) for thing, kind in self._world.objects.items()}
        self.start: Bits = self._world.initial
        self.won = self._world.won
        self._commands: dict[str, list[Operator]] = defaultdict(list)
        # Commands and their operators, by the bit of the location where the agent must be. So `admissible` needs to
        # test only those of the agent's location.
        self._from: dict[Bits, list[tuple[str, Operator]]] = defaultdict(list)
        places = sum(bit for atom, bit in self._world.bits.items() if atom[0] == "atlocation")
        for operator in self._world.operators:
            command = self._grammar.derive(self._grammar.templates[operator.name], self._scope(self.start, operator))
            self._commands[command].append(operator)
            self._from[operator.holds & places].append((command, operator))
        self._memo: dict[tuple[Bits, str], Transition] = {}
        self._admissible: dict[Bits, tuple[str, ...]] = {}
        self.intro = self._grammar.derive("#intro#", self._scope(self.start)).replace(_PLACEHOLDER, self.task)

    def step(self, state: Bits, command: str) -> Transition:
        """Return the result of ``command`` in ``state``.

        A command that is not literally one of `admissible` does not change the state, and its feedback is `NOTHING`.
        """
        known = self._memo.get((state, command))
        if known is not None:
            return known
        operators = self._commands.get(command)
        if operators is None:  # This result is not cached, because the number of wrong commands is unlimited.
            return Transition(NOTHING, state, self.won(state))
        operator = next((op for op in operators if op.applicable(state)), None)
        if operator is None:
            transition = Transition(NOTHING, state, self.won(state))
        else:
            after = operator.apply(state)
            text = self._grammar.derive(self._grammar.feedback[operator.name], self._scope(after, operator))
            transition = Transition(text, after, self.won(after))
        if len(self._memo) >= _MEMO_LIMIT:
            self._memo.clear()
            self._admissible.clear()
        self._memo[state, command] = transition
        return transition

    def admissible(self, state: Bits) -> tuple[str, ...]:
        """Return the commands that the game accepts in ``state``, sorted."""
        known = self._admissible.get(state)
        if known is None:
            found: set[str] = set()
            for place, pairs in self._from.items():
                if place & state == place:
                    found.update(command for command, operator in pairs if operator.applicable(state))
            known = self._admissible[state] = tuple(sorted(found))
        return known

    def _scope(self, state: Bits, operator: Operator | None = None) -> Scope:
        mapping: Mapping[tuple[str, str], str] = {}
        if operator is not None:
            mapping = dict(zip(self._parameters[operator.name], operator.arguments, strict=True))
        return Scope(self._facts, state, self._entities, mapping)


def demangle(objects: Mapping[str, str]) -> dict[str, str]:
    """Return the name that the player sees for each object, such as "cabinet 2" for ``cabinet_bar_...``.

    ``objects`` maps each object's PDDL name to its type. The numbers are those of alfworld's own demangler.
    """
    kinds = {}
    for thing in objects:
        if "_bar_" in thing:
            kinds[thing] = thing.split("_bar_", 1)[0] + ("basin" if "basin" in thing else "")
    left = Counter(kinds.values())
    names = {thing: thing for thing in objects if thing not in kinds}
    for thing in sorted(kinds):  # as in alfworld, the first object of a kind gets the highest number
        names[thing] = f"{kinds[thing]} {left[kinds[thing]]}"
        left[kinds[thing]] -= 1
    return names


@lru_cache(maxsize=1)
def package_texts() -> tuple[str, str]:
    """Return the PDDL domain and the ``.twl2`` grammar of the installed alfworld package, as texts."""
    data = resources.files("alfworld") / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


@lru_cache(maxsize=8)
def _read_grammar(domain_text: str, grammar_text: str) -> Grammar:
    return Grammar(domain_text, grammar_text)
