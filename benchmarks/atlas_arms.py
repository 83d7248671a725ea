"""The domains and arms that `atlas.py` compares. docs/reference/atlas.md describes each arm and its source."""

from __future__ import annotations

from pathlib import Path

from replay_arms import ARMS as REPLAY_ARMS
from replay_arms import DOMAINS as REPLAY_DOMAINS
from replay_arms import Settings

_HERE = Path(__file__).parent
_DESIGNS, _CURRICULA, _HINDSIGHT = _HERE / "atlas_designs.py", _HERE / "atlas_curricula.py", _HERE / "hindsight.py"
_OBSERVATIONS = _HERE / "observation_updates.py"

# The warm start learns to predict observations too, so that the arms with an observation loss start from a policy that
# this loss does not have to change first. All arms of a domain and seed share it.
_SHARED: Settings = {"warm_start.observation_coefficient": 0.1, "points": 1}

DOMAINS: dict[str, Settings] = {
    "many tasks": {**REPLAY_DOMAINS["alfworld hard, 256 tasks"], **_SHARED, "run.steps": 40},
    "few tasks": {**REPLAY_DOMAINS["alfworld hard"], **_SHARED, "run.steps": 40},
    "easy tasks": {**REPLAY_DOMAINS["alfworld easy"], **_SHARED, "run.steps": 30},
}

REFERENCE = "replay"
"""The arm with which all others are compared: the default settings of replay."""

_REPLAY: Settings = REPLAY_ARMS["replay"]
_ATTACHED: Settings = {"replay.enabled": True, "replay.task_ratio": 0.0, "replay.pool_updates": 0}
_OUTCOMES: Settings = {**_ATTACHED, "replay.per_group": 4}
_POOL_ONLY: Settings = {"replay.enabled": True, "replay.task_ratio": 0.0}
_PRIORITY: Settings = {**_POOL_ONLY, "replay.tasks": "rescue", "replay.select": "newest", "replay.max_age": 10}
_FAILURES: Settings = {**_REPLAY, "replay.keep_failures": 2}
_RESTARTS: Settings = {**_REPLAY, "replay.restart_share": 0.25}

ARMS: dict[str, Settings] = {
    REFERENCE: _REPLAY,
    "on-policy": {},
    "on-policy, lower rate": {},
    "selection": REPLAY_ARMS["selection"],
    "own step": _REPLAY,
    "ExGRPO": REPLAY_ARMS["as published"],
    "RLEP": {**_ATTACHED, "replay.select": "random", "replay.baseline": "group"},
    "RePO": {**_OUTCOMES, "credit.estimator": f"{_DESIGNS}:compared_apart"},
    "TOPR": {**_OUTCOMES, "credit.estimator": f"{_DESIGNS}:signs", "loss.replay_mode": f"{_DESIGNS}:topr"},
    "SPEAR": {**_ATTACHED, "replay.select": "newest", "credit.estimator": f"{_DESIGNS}:recalibrated"},
    "FreshPER": {**_POOL_ONLY, "replay.tasks": "uniform", "replay.select": f"{_DESIGNS}:fresh_per"},
    "rollout priority": _PRIORITY,
    "M2PO": {**_REPLAY, "loss.replay_mode": f"{_DESIGNS}:m2po"},
    "GiGPO": {"credit.estimator": "gigpo"},
    "GiGPO, replay": REPLAY_ARMS["GiGPO, replay"],
    "replay, lower rate": _REPLAY,
    "GiGPO, replay, no discount": {**_REPLAY, "credit.estimator": "gigpo", "credit.options": {"gamma": 1.0}},
    "discount, replay": {**_REPLAY, "credit.estimator": f"{_DESIGNS}:discounted"},
    "GiGPO, replay, half": REPLAY_ARMS["GiGPO, replay"],
    "state GAE, replay": {**_REPLAY, "credit.estimator": "state_gae"},
    "GiGPO, rollout priority": {**_PRIORITY, "credit.estimator": "gigpo"},
    "ECHO": {"loss.observation_coefficient": 0.03},
    "ECHO, replay": {**_REPLAY, "loss.observation_coefficient": 0.03},
    "restarts": _RESTARTS,
    "restarts, no prefix": _RESTARTS,
    "restarts, random cut": _RESTARTS,
    "boundary failures": _FAILURES,
    "observations, memory": _FAILURES,
    "observations, step": _REPLAY,
    "hindsight": _REPLAY,
    "hindsight, wrong goals": _REPLAY,
}

CURRICULA: dict[str, str] = {
    "own step": f"{_CURRICULA}:OwnStep",
    "RLEP": f"{_CURRICULA}:AttachToEveryGroup",
    "RePO": f"{_CURRICULA}:AttachNewestOutcomes",
    "TOPR": f"{_CURRICULA}:AttachNewestOutcomes",
    "SPEAR": f"{_CURRICULA}:AttachToEveryGroup",
    "restarts, no prefix": f"{_CURRICULA}:WithoutPrefix",
    "restarts, random cut": f"{_CURRICULA}:RandomCut",
    "boundary failures": f"{_HERE / 'boundary_pairs.py'}:BoundaryPairs",
    "observations, memory": f"{_OBSERVATIONS}:ObservationsFromMemory",
    "observations, step": f"{_OBSERVATIONS}:ObservationsOfStep",
    "hindsight": f"{_HINDSIGHT}:Hindsight",
    "hindsight, wrong goals": f"{_HINDSIGHT}:WrongGoals",
}
"""Import paths of the curricula that change the groups of an arm's `ReplayCurriculum`."""

HALVED = ("GiGPO, replay, half",)
"""The arms that make half of a domain's steps."""

CONTROLS: dict[str, str] = {
    "on-policy": REFERENCE,
    "selection": REFERENCE,
    "own step": REFERENCE,
    "on-policy, lower rate": "GiGPO, replay",
    "replay, lower rate": "GiGPO, replay",
    "GiGPO, replay, no discount": "GiGPO, replay",
    "discount, replay": "GiGPO, replay",
    "GiGPO, replay, half": "GiGPO, replay",
    "restarts, no prefix": "restarts",
    "restarts, random cut": "restarts",
    "observations, step": "observations, memory",
    "hindsight, wrong goals": "hindsight",
}
"""The arms that are controls of another one, and get as many seeds as it does."""
