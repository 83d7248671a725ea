"""Compiles a PDDL problem into ground actions on integers, so that a step takes microseconds.

A fluent is a fact that actions can change; all other facts are static. A state is one Python integer with one bit for
each ground fluent.

Fast Downward's front end, which the stock engine uses too, parses and normalises the domain. It splits disjunctions and
moves quantifiers out, which leaves one conjunction of literals as the precondition of each action. `World` finds the
objects that satisfy the static literals of a precondition by joining them, and turns its fluent literals into bit
masks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

Atom = tuple[str, ...]
"""A ground atom: the name of the predicate, then the ids of its arguments."""
Bits = int


@dataclass(frozen=True, slots=True)
class Literal:
    predicate: str
    terms: tuple[str, ...]  # variables start with "?"
    negated: bool

    def ground(self, binding: Mapping[str, str]) -> Atom:
        return (self.predicate, *(binding.get(term, term) for term in self.terms))


@dataclass(frozen=True, slots=True)
class Rule:
    """A conjunction of literals over typed variables.

    It is the precondition of an action, the condition of an effect, or the body of a rule that derives the fact
    ``head``. ``parameters`` are the variables and their types.
    """

    head: Literal | None
    parameters: tuple[tuple[str, str], ...]
    body: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """A normalised action that is not yet ground. Each of its effects has a condition and a literal.

    The first ``external`` parameters are those of the action in the domain's text. Normalisation added the others.
    """

    name: str
    external: int
    rule: Rule
    effects: tuple[tuple[Rule, Literal], ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """A ground action, which is applicable in states with all bits of ``holds`` set and no bit of ``lacks`` set.

    Applying it clears the bits ``deletes`` and then sets the bits ``adds``, so a bit in both is set afterwards.
    """

    name: str
    arguments: tuple[str, ...]
    holds: Bits
    lacks: Bits
    adds: Bits
    deletes: Bits
    conditional: tuple[tuple[Bits, Bits, Bits, Bits], ...]  # (holds, lacks, adds, deletes) of conditional effects

    def applicable(self, state: Bits) -> bool:
        return state & self.holds == self.holds and not state & self.lacks

    def apply(self, state: Bits) -> Bits:
        adds, deletes = self.adds, self.deletes
        for holds, lacks, more, less in self.conditional:
            if state & holds == holds and not state & lacks:
                adds, deletes = adds | more, deletes | less
        return state & ~deletes | adds


class Domain:
    """A parsed and normalised PDDL domain. Use `read_domain` to make one, which caches domains by their text."""

    def __init__(self, text: str) -> None:
        _, pddl, lisp, parsing = _import_front_end()
        parts = list(parsing.parse_domain_pddl(lisp.parse_nested_list(text.split("\n"))))
        self._name, self._requirements, self._types, self._type_dict = parts[:4]
        self._constants, self._predicates, self._predicate_dict, self._functions = parts[4:8]
        actions, axioms = parts[8], parts[9]
        task = self._normalize(pddl.Conjunction([]), actions, axioms)
        if task.axioms:
            raise ValueError("derived predicates and universal preconditions are not supported in a game's domain")
        self.schemas = tuple(_schema(action) for action in task.actions)
        self.parameters = {schema.name: schema.rule.parameters[: schema.external] for schema in self.schemas}
        self.fluents = frozenset(literal.predicate for s in self.schemas for _, literal in s.effects)
        self.read = frozenset(
            literal.predicate
            for schema in self.schemas
            for rule in (schema.rule, *(rule for rule, _ in schema.effects))
            for literal in rule.body
        )
        self.supertypes: dict[str, frozenset[str]] = {
            kind.name: frozenset([kind.name, *kind.supertype_names]) for kind in self._types
        }

    def problem(self, text: str) -> tuple[dict[str, str], list[Atom], tuple[Literal, ...], tuple[Rule, ...]]:
        """Parse the text of a problem.

        Returns the type of each object, the initial facts, the literals of the goal, and the rules that derive the
        facts which normalisation has introduced into the goal.
        """
        _, _, lisp, parsing = _import_front_end()
        parsed = lisp.parse_nested_list(text.split("\n"))
        fields = list(parsing.parse_task_pddl(parsed, self._type_dict, self._predicate_dict))
        objects, init, goal = fields[3], fields[4], fields[5]
        facts = [(atom.predicate, *atom.args) for atom in init if hasattr(atom, "predicate")]
        task = self._normalize(goal, [], [])
        rules = tuple(
            Rule(
                Literal(axiom.name, tuple(p.name for p in axiom.parameters[: axiom.num_external_parameters]), False),
                tuple((p.name, p.type_name) for p in axiom.parameters),
                _literals(axiom.condition),
            )
            for axiom in task.axioms
        )
        typed = {thing.name: thing.type_name for thing in (*self._constants, *objects)}
        return typed, facts, _literals(task.goal), rules

    def _normalize(self, goal: Any, actions: list[Any], axioms: list[Any]) -> Any:
        """Return a Fast Downward task of this domain with ``goal``, ``actions`` and ``axioms``, after normalisation."""
        normalize, pddl, _, _ = _import_front_end()
        fields = (self._requirements, self._types, list(self._constants), list(self._predicates), self._functions)
        task = pddl.Task(self._name, "game", *fields, [], goal, actions, axioms, False)
        normalize.normalize(task)
        return task


@lru_cache(maxsize=8)
def read_domain(text: str) -> Domain:
    return Domain(text)


class World:
    """A grounded problem: its objects, operators, initial state and the test for its goal.

    ``observed`` names the predicates that the game's text depends on. A predicate ``not_p`` among them means the same
    as in the stock engine: its fact becomes true when an action deletes the fact of ``p`` with the same arguments, and
    false when an action adds that fact. It is false if the fact of ``p`` was never true.

    The state has no bits for fluents that neither actions, goal nor text read. So states that differ only in such
    fluents are equal and share their cached transitions.
    """

    def __init__(self, rules: Domain, problem: str, observed: Iterable[str]) -> None:
        self.objects, facts, goal, derived = rules.problem(problem)
        self.supertypes = rules.supertypes
        self.fluents = rules.fluents
        goal_reads = {literal.predicate for rule in derived for literal in rule.body} | {g.predicate for g in goal}
        self._read = rules.read | goal_reads | set(observed)
        self._static: dict[str, set[Atom]] = defaultdict(set)
        self._indices: dict[tuple[str, tuple[int, ...]], dict[tuple[str, ...], list[Atom]]] = {}
        self._by_type: dict[str, list[str]] = defaultdict(list)
        for name, kind in self.objects.items():
            for supertype in self.supertypes.get(kind, (kind,)):
                self._by_type[supertype].append(name)
        self.bits: dict[Atom, Bits] = {}
        self.initial: Bits = 0
        for fact in facts:
            if fact[0] not in self.fluents:
                self._static[fact[0]].add(fact)
            elif fact[0] in self._read:
                self.initial |= self._bit(fact)
        self.operators = [op for schema in rules.schemas for op in self._operators(schema)]
        self.won = self._goal(goal, derived)

    def static(self, predicate: str) -> set[Atom]:
        return self._static.get(predicate, set())

    def _bit(self, atom: Atom) -> Bits:
        bit = self.bits.get(atom)
        if bit is None:
            bit = self.bits[atom] = 1 << len(self.bits)
        return bit

    def _operators(self, schema: Schema) -> Iterator[Operator]:
        seen: set[tuple[Any, ...]] = set()
        names = [name for name, _ in schema.rule.parameters[: schema.external]]
        for binding, holds, lacks in self._groundings(schema.rule):
            plain: list[tuple[Atom, bool]] = []
            conditional: list[tuple[Bits, Bits, tuple[Atom, bool]]] = []
            for rule, literal in schema.effects:
                if not rule.parameters and not rule.body:
                    plain.append((literal.ground(binding), literal.negated))
                    continue
                for inner, held, lacked in self._groundings(rule, binding):
                    conditional.append((held, lacked, (literal.ground(inner), literal.negated)))
            adds, deletes, changes = self._masks(plain, holds, lacks)
            branches = tuple((h, n, *self._masks([effect], 0, 0)[:2]) for h, n, effect in conditional)
            if not changes and not branches:
                # Like Fast Downward, drop an operator that cannot change any state in which it is applicable, such as
                # "go to" the agent's own location.
                continue
            arguments = tuple(binding[name] for name in names)
            key = (arguments, holds, lacks, adds, deletes, branches)
            if key not in seen:
                seen.add(key)
                yield Operator(schema.name, arguments, holds, lacks, adds, deletes, branches)

    def _masks(self, effects: list[tuple[Atom, bool]], holds: Bits, lacks: Bits) -> tuple[Bits, Bits, bool]:
        """Return the mask of the bits to set, the mask of the bits to clear, and whether the effects can change
        a state.

        Only states in which the operator is applicable are considered. ``holds`` and ``lacks`` are the masks of its
        precondition. Each effect is a pair: a fact, and whether the fact is negated.
        """
        added = {atom for atom, negated in effects if not negated}
        adds = deletes = 0
        changes = False
        for atom, negated in effects:
            if negated and atom in added:
                continue
            if atom[0] not in self._read:
                changes = True
            else:
                bit = self._bit(atom)
                adds, deletes = (adds, deletes | bit) if negated else (adds | bit, deletes)
                changes = changes or not bit & (lacks if negated else holds)
            if f"not_{atom[0]}" in self._read:
                memory = self._bit((f"not_{atom[0]}", *atom[1:]))
                adds, deletes = (adds | memory, deletes) if negated else (adds, deletes | memory)
        return adds, deletes, changes

    def _groundings(
        self, rule: Rule, given: dict[str, str] | None = None
    ) -> Iterator[tuple[dict[str, str], Bits, Bits]]:
        """Yield each binding of a rule's variables that satisfies the static literals of the rule's body.

        Each binding comes with the masks of the fluents that must be true and that must be false. ``given`` contains
        variables that are already bound.
        """
        joins, checks, fluent = [], [], []
        for literal in rule.body:
            if literal.predicate in self.fluents:
                fluent.append(literal)
            elif literal.negated or literal.predicate == "=":
                checks.append(literal)
            else:
                joins.append(literal)
        types = dict(rule.parameters)
        for binding in self._join(dict(given or {}), joins, types):
            if not all(self._static_holds(literal, binding) for literal in checks):
                continue
            holds = lacks = 0
            for literal in fluent:
                bit = self._bit(literal.ground(binding))
                holds, lacks = (holds, lacks | bit) if literal.negated else (holds | bit, lacks)
            yield binding, holds, lacks

    def _static_holds(self, literal: Literal, binding: dict[str, str]) -> bool:
        atom = literal.ground(binding)
        true = atom[1] == atom[2] if atom[0] == "=" else atom in self.static(atom[0])
        return true != literal.negated

    def _join(
        self, binding: dict[str, str], literals: list[Literal], types: dict[str, str]
    ) -> Iterator[dict[str, str]]:
        if not literals:
            free = [name for name in types if name not in binding]
            for values in product(*(self._by_type[types[name]] for name in free)):
                yield {**binding, **dict(zip(free, values, strict=True))}
            return
        unbound = [sum(t.startswith("?") and t not in binding for t in literal.terms) for literal in literals]
        literal = literals[unbound.index(min(unbound))]
        rest = [other for other in literals if other is not literal]
        values = [binding.get(term, term) for term in literal.terms]
        known = tuple(i for i, value in enumerate(values) if not value.startswith("?"))
        for atom in self._index(literal.predicate, known).get(tuple(values[i] for i in known), ()):
            extended = dict(binding)
            for term, value in zip(literal.terms, atom[1:], strict=True):
                if term.startswith("?") and extended.setdefault(term, value) != value:
                    break
            else:
                kinds = [(self.objects[extended[t]], types[t]) for t in literal.terms if t in types]
                if all(own == kind or kind in self.supertypes.get(own, ()) for own, kind in kinds):
                    yield from self._join(extended, rest, types)

    def _index(self, predicate: str, known: tuple[int, ...]) -> dict[tuple[str, ...], list[Atom]]:
        index = self._indices.get((predicate, known))
        if index is None:
            index = self._indices[predicate, known] = defaultdict(list)
            for atom in sorted(self.static(predicate)):
                index[tuple(atom[1 + i] for i in known)].append(atom)
        return index

    def _goal(self, goal: Sequence[Literal], rules: Sequence[Rule]) -> Callable[[Bits], bool]:
        derived: dict[Atom, list[Callable[[Bits], bool]]] = defaultdict(list)
        names = {rule.head.predicate for rule in rules if rule.head}

        def test(literals: Iterable[Literal], binding: dict[str, str]) -> Callable[[Bits], bool]:
            plain = tuple(lit for lit in literals if lit.predicate not in names)
            nested = [(lit.ground(binding), lit.negated) for lit in literals if lit.predicate in names]
            masks = [(holds, lacks) for _, holds, lacks in self._groundings(Rule(None, (), plain), binding)]

            def holds_in(state: Bits) -> bool:
                return any(state & h == h and not state & n for h, n in masks) and all(
                    any(body(state) for body in derived[atom]) != negated for atom, negated in nested
                )

            return holds_in

        for rule in rules:
            assert rule.head is not None
            plain = tuple(lit for lit in rule.body if lit.predicate not in names)
            for binding, _, _ in self._groundings(Rule(None, rule.parameters, plain)):
                derived[rule.head.ground(binding)].append(test(rule.body, binding))
        return test(goal, {})


def _schema(action: Any) -> Schema:
    parameters = tuple((p.name, p.type_name) for p in action.parameters)
    effects = tuple(
        (
            Rule(None, tuple((p.name, p.type_name) for p in effect.parameters), _literals(effect.condition)),
            _literal(effect.literal),
        )
        for effect in action.effects
    )
    rule = Rule(None, parameters, _literals(action.precondition))
    return Schema(action.name, action.num_external_parameters, rule, effects)


def _literals(condition: Any) -> tuple[Literal, ...]:
    kind = type(condition).__name__
    if kind == "Truth":
        return ()
    if kind == "Conjunction":
        return tuple(literal for part in condition.parts for literal in _literals(part))
    return (_literal(condition),)


def _literal(literal: Any) -> Literal:
    if type(literal).__name__ not in ("Atom", "NegatedAtom"):
        raise ValueError(f"a game's condition is not a literal after normalisation: {literal!r}")
    return Literal(literal.predicate, tuple(literal.args), bool(literal.negated))


def _import_front_end() -> tuple[Any, Any, Any, Any]:
    """Return the modules ``normalize``, ``pddl``, ``lisp_parser`` and ``parsing_functions`` of Fast Downward."""
    # Fast Downward parses sys.argv as its own command line when it is imported.
    argv, sys.argv = sys.argv, ["translate", "domain", "task"]
    try:
        from fast_downward.translate import normalize, pddl  # type: ignore[import-untyped]
        from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions  # type: ignore[import-untyped]
    finally:
        sys.argv = argv
    return normalize, pddl, lisp_parser, parsing_functions
