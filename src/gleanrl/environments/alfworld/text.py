"""Writes the texts of a game by expanding its grammar, whose productions depend on the state of the game.

TextWorld parses the grammar. TextWorld's own evaluator also parses and copies during evaluation, which takes
milliseconds per sentence. This module instead compiles each production once into a Python closure. A test compares the
texts with those of TextWorld.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gleanrl.environments.alfworld.pddl import Atom, Bits, World

Mapped = Mapping[tuple[str, str], str]
"""An assignment of objects to placeholders: (placeholder, type) -> id of the object."""


@dataclass(frozen=True, slots=True)
class Entity:
    """The properties of an object that a grammar expression may read."""

    id: str
    type: str
    name: str
    definite: str = "the"
    indefinite: str = "a"

    def __str__(self) -> str:
        return self.name


class Facts:
    """Looks up the facts of a world that are true in a given state, by predicate and argument, in sorted order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows: dict[tuple[str, int, str], list[tuple[Atom, Bits]]] = {}
        self._fluent: dict[str, list[tuple[Atom, Bits]]] = {}
        for atom, bit in world.bits.items():
            self._fluent.setdefault(atom[0], []).append((atom, bit))

    def rows(self, predicate: str, position: int, value: str) -> list[tuple[Atom, Bits]]:
        """Return the atoms of ``predicate`` whose argument number ``position``, counted from 1, is ``value``.

        Each atom comes with its bit in the state. Static atoms, which are always true, have bit 0. Position 0 returns
        all atoms of the predicate.
        """
        key = (predicate, position, value)
        found = self._rows.get(key)
        if found is None:
            atoms = [(atom, 0) for atom in self._world.static(predicate)] + self._fluent.get(predicate, [])
            found = self._rows[key] = sorted(row for row in atoms if not position or row[0][position] == value)
        return found

    def match(
        self, query: tuple[tuple[str, tuple[tuple[str, str], ...]], ...], state: Bits, mapping: Mapped
    ) -> Iterator[Mapped]:
        """Yield each extension of ``mapping`` that makes all conditions in ``query`` true in ``state``.

        ``mapping`` assigns objects to placeholders. No object is assigned to two placeholders.
        """
        if not query:
            yield mapping
            return
        (predicate, placeholders), rest = query[0], query[1:]
        position, value = 0, ""
        for index, placeholder in enumerate(placeholders, start=1):
            if placeholder in mapping:
                position, value = index, mapping[placeholder]
                break
        for atom, bit in self.rows(predicate, position, value):
            if bit & state == bit:
                extended = self._bind(placeholders, atom[1:], mapping)
                if extended is not None:
                    yield from self.match(rest, state, extended)

    def _bind(
        self, placeholders: tuple[tuple[str, str], ...], objects: tuple[str, ...], mapping: Mapped
    ) -> Mapped | None:
        extended = dict(mapping)
        for placeholder, thing in zip(placeholders, objects, strict=True):
            known = extended.get(placeholder)
            if known is not None:
                if known != thing:
                    return None
                continue
            own = self._world.objects[thing]
            if placeholder[1] not in self._world.supertypes.get(own, (own,)) or thing in extended.values():
                return None
            extended[placeholder] = thing
        return extended


@dataclass(frozen=True, slots=True)
class Scope:
    """The state and the variables with which a grammar expression is evaluated."""

    facts: Facts
    state: Bits
    entities: Mapping[str, Entity]
    mapping: Mapped


Node = Callable[[Scope], list[str]]
Query = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


class Grammar:
    """A ``.twl2`` grammar, parsed by TextWorld and compiled when it is used.

    ``templates`` and ``feedback`` map each action to the grammar text from which its command and its feedback are
    derived.
    """

    def __init__(self, domain_text: str, grammar_text: str) -> None:
        from textworld.envs.pddl.logic import GameLogic
        from textworld.envs.pddl.textgen import _parse_and_convert

        logic = GameLogic(domain_text, grammar_text)
        self._parse: Callable[[str], Any] = lambda text: _parse_and_convert(text, rule_name="symbols")
        self._rules: Mapping[str, list[Any]] = logic.grammar._rules
        self._compiled: dict[str, list[tuple[Query, Node]]] = {}
        self._starts: dict[str, Node] = {}
        self.templates: dict[str, str] = {name: action.template for name, action in logic.actions.items()}
        self.feedback: dict[str, str] = {name: action.feedback_rule for name, action in logic.actions.items()}
        self.predicates = frozenset(re.findall(r"(\w+)\((?=\w+:)", grammar_text))
        """Names of the predicates that the conditions in the grammar read."""

    def derive(self, start: str, scope: Scope) -> str:
        node = self._starts.get(start)
        if node is None:
            node = self._starts[start] = self._sequence(self._parse(start))
        return "".join(node(scope))

    def _productions(self, symbol: str) -> list[tuple[Query, Node]]:
        productions = self._compiled.get(symbol)
        if productions is None:
            productions = [
                (_read_query(rule.condition), self._sequence(rule.rhs)) for rule in self._rules.get(symbol, ())
            ]
            if not productions:
                raise KeyError(f"the game's grammar has no rule for #{symbol}#")
            self._compiled[symbol] = productions
        return productions

    def _sequence(self, symbols: Iterable[Any]) -> Node:
        nodes = [self._node(symbol) for symbol in symbols]
        return lambda scope: ["".join(part for node in nodes for part in node(scope))]

    def _node(self, symbol: Any) -> Node:
        kind = type(symbol).__name__
        if kind == "TerminalSymbol":
            text = str(symbol)
            return lambda scope: [text]
        if kind == "NonterminalSymbol":
            return self._nonterminal(str(symbol))
        if kind == "EvalSymbol":
            code = compile(symbol.expression.strip(), "<game grammar>", "eval")

            def evaluate(scope: Scope) -> list[str]:
                variables = {name: scope.entities[thing] for (name, _), thing in scope.mapping.items()}
                return [str(eval(code, {"__builtins__": {}}, variables))]

            return evaluate
        if kind == "ConditionalSymbol":
            inner, query = self._node(symbol.expression), _read_query(symbol.given)

            def expand_matches(scope: Scope) -> list[str]:
                parts: list[str] = []
                for mapping in scope.facts.match(query, scope.state, scope.mapping):
                    parts += inner(Scope(scope.facts, scope.state, scope.entities, mapping))
                return parts

            return expand_matches if query else inner
        if kind == "ListSymbol":
            return self._list(self._node(symbol.symbol))
        raise TypeError(f"unknown grammar symbol {kind}")

    def _nonterminal(self, key: str) -> Node:
        def expand(scope: Scope) -> list[str]:
            for query, node in self._productions(key):
                if next(scope.facts.match(query, scope.state, scope.mapping), None) is not None:
                    return node(scope)
            raise KeyError(f"no rule of #{key}# of the game's grammar applies")

        return expand

    def _list(self, inner: Node) -> Node:
        empty, comma, last = map(self._nonterminal, ("list_empty", "list_separator", "list_last_separator"))

        def enumerate_all(scope: Scope) -> list[str]:
            items = inner(scope)
            if not items:
                return empty(scope)
            if len(items) == 1:
                return items
            return [comma(scope)[0].join(items[:-1]), last(scope)[0], items[-1]]

        return enumerate_all


def _read_query(condition: str | None) -> Query:
    """Parse a condition such as ``p(a:agent) & q(r:receptacle)`` into predicates and their (placeholder, type)
    arguments.
    """
    atoms = []
    for text in (condition or "").split("&"):
        if not text.strip():
            continue
        found = re.fullmatch(r"\s*(\w+)\(([^)]*)\)\s*", text)
        if found is None:
            raise ValueError(f"cannot read the condition {text!r} of the game's grammar")
        arguments = [part.strip().partition(":") for part in found[2].split(",") if part.strip()]
        atoms.append((found[1], tuple((name.strip(), kind.strip()) for name, _, kind in arguments)))
    return tuple(atoms)
