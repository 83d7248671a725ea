"""Finds environments by name: built-in ones by a short name, a user's own ones by an import path.

`load_taskset` makes the taskset of a run from its settings. A taskset is a family of tasks together with the
environments in which they are played. `check` only validates the settings.

An environment of your own needs no entry here. Derive classes from `gleanrl.protocols.Taskset` and `Environment`, and
set ``environment.name = "file.py:Class"``, where ``Class`` is the taskset. To add a built-in environment, add a line to
`BUILT_IN`, its name to the docstring of `gleanrl.config.settings.EnvironmentSettings.name` and, if it depends on
packages, an extra to pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gleanrl.protocols import Taskset
from gleanrl.utils.errors import UserError, raised_at
from gleanrl.utils.importing import load_object
from gleanrl.utils.text import nearest

if TYPE_CHECKING:
    from gleanrl.config.settings import EnvironmentSettings


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    path: str  # import path of the class or function that makes the taskset
    packages: tuple[str, ...]  # names of the third-party modules that the environment imports
    extra: str  # name of the extra (optional dependencies of gleanrl) that installs these modules; "" if there are none


BUILT_IN: Mapping[str, _BuiltIn] = {
    "alfworld": _BuiltIn("gleanrl.environments.alfworld:AlfworldTaskset", ("alfworld", "textworld"), "alfworld"),
    "textworld": _BuiltIn(
        "gleanrl.environments.textworld.taskset:TextworldTaskset", ("textworld", "jericho"), "textworld"
    ),
    "reasoning_gym": _BuiltIn(
        "gleanrl.environments.adapters.reasoning_gym:ReasoningGymTaskset", ("reasoning_gym",), "reasoning-gym"
    ),
    "textarena": _BuiltIn("gleanrl.environments.adapters.textarena:TextarenaTaskset", ("textarena",), "textarena"),
    "gymnasium": _BuiltIn("gleanrl.environments.adapters.gymnasium_text:GymnasiumTaskset", ("gymnasium",), "gymnasium"),
    "dataset": _BuiltIn("gleanrl.environments.dataset.taskset:DatasetTaskset", (), ""),
    "mixture": _BuiltIn("gleanrl.environments.mixture:mixture", (), ""),
    "openenv": _BuiltIn("gleanrl.environments.adapters.openenv:OpenEnvTaskset", ("aiohttp",), "openenv"),
    "verifiers": _BuiltIn("gleanrl.environments.adapters.verifiers:VerifiersTaskset", ("verifiers",), "verifiers"),
    "tools": _BuiltIn("gleanrl.environments.tools:ToolTaskset", (), ""),
    "agent": _BuiltIn("gleanrl.environments.agent.taskset:AgentTaskset", ("aiohttp",), "agent"),
    "service": _BuiltIn("gleanrl.environments.service.client:ServiceTaskset", ("aiohttp",), "rewards"),
}


def check(settings: EnvironmentSettings) -> None:
    """Check that the environment exists and has the options that are set, without making the taskset.

    The values of the options are not checked.

    Raises:
        UserError: the name is unknown, a package is missing, the class is no taskset or lacks a method, or an option is
            unknown or missing.
    """
    _checked_options(settings.name, _factory(settings.name), settings.options, seed=0)


def load_taskset(settings: EnvironmentSettings, seed: int) -> Taskset:
    """Make the taskset ``settings.name`` with the arguments ``settings.options``.

    A taskset that has an option ``seed`` gets ``seed``, unless ``settings.options`` contains a seed.

    Raises:
        UserError: the name is unknown, a package is missing, an option is unknown or missing or has a value that the
            taskset refuses, or the object that is made does not derive from `Taskset` or lacks one of its methods.
    """
    # Imported here, because every worker process of an environment imports this package. Without pydantic, a worker
    # whose taskset does not use it starts in half the time.
    from pydantic import ValidationError

    factory = _factory(settings.name)
    options = _checked_options(settings.name, factory, settings.options, seed)
    try:
        taskset = factory(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        where = f"environment.options.{key} = {first['input']!r}" if key else f"environment {settings.name!r}"
        raise UserError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
    except (ValueError, TypeError) as error:
        why = f"{error}{raised_at(error)}"
        raise UserError(f"environment {settings.name!r} refuses its options {settings.options}: {why}") from error
    if not isinstance(taskset, Taskset):
        raise UserError(
            f"environment {settings.name!r}: {type(taskset).__name__} must derive from gleanrl.protocols.Taskset"
        )
    return taskset


def _factory(name: str) -> Any:
    """Return the class or function that makes the taskset ``name``.

    Raises:
        UserError: there is no such environment, or a package that it needs is not installed.
    """
    known = BUILT_IN.get(name)
    if known is None:
        if ":" in name:
            return load_object(name)
        hint = nearest(name, BUILT_IN) or f"; there are {', '.join(BUILT_IN)}, or give `package.module:Class`"
        raise UserError(f"environment.name: no environment {name!r}{hint}")
    if any(importlib.util.find_spec(package) is None for package in known.packages):
        raise UserError(f"environment {name!r} needs the extra: pip install 'gleanrl[{known.extra}]'")
    return load_object(known.path)


def _checked_options(name: str, factory: Any, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return ``options``, with the seed added if ``factory`` takes one.

    Raises:
        UserError: ``factory`` cannot be called, is a class that is no taskset or lacks a method, does not take one of
            the options, or needs an option that is missing.
    """
    if not callable(factory):
        raise UserError(f"environment.name = {name!r}: a {type(factory).__name__}, not a class that can be called")
    if missing := ", ".join(sorted(getattr(factory, "__abstractmethods__", ()))):
        raise UserError(f"environment {name!r}: {factory.__name__} does not implement {missing}")
    if isinstance(factory, type) and not issubclass(factory, Taskset):
        raise UserError(f"environment {name!r}: {factory.__name__} must derive from gleanrl.protocols.Taskset")
    parameters = inspect.signature(factory).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for key in options:
        if key not in named and not anything:
            takes = nearest(key, named) or (f"; it takes {', '.join(named)}" if named else "; it takes none")
            raise UserError(f"environment.options.{key}: {name!r} has no such option{takes}")
    given = {"seed": seed, **options} if "seed" in named or anything else dict(options)
    for key in named:
        if parameters[key].default is inspect.Parameter.empty and key not in given:
            raise UserError(f"environment.options.{key}: {name!r} needs it")
    return given
