"""The tool ``python``, with which a model runs Python code in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from gleanrl.environments.tools.executor import Isolation, Limits, PythonSandbox, Session
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

_OPTIONS = ("isolation", "packages", "persistent", "concurrency", *Limits.__slots__)
_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, PythonSandbox]] = WeakKeyDictionary()
"""The sandboxes in use: event loop -> options -> sandbox.

All episodes with the same options share a sandbox, so that ``concurrency`` limits the calls of all of them together."""


class PythonTool:
    """The tool ``python(code)`` of one episode.

    Args:
        persistent: whether the calls of the episode share one interpreter and its variables. Otherwise each call has a
            new interpreter.
        isolation, packages, concurrency: see `gleanrl.environments.tools.executor.PythonSandbox`.
        limits: fields of `gleanrl.environments.tools.executor.Limits`.
    """

    def __init__(
        self,
        *,
        persistent: bool = False,
        isolation: Isolation = "auto",
        packages: bool = True,
        concurrency: int | None = None,
        **limits: Any,
    ) -> None:
        self._limits = Limits(**limits)
        self._options: dict[str, Any] = {"isolation": isolation, "packages": packages, "concurrency": concurrency}
        self._persistent = persistent
        self._session: Session | None = None

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of a last expression.

        Args:
            code: the program.
        """
        sandbox = self._sandbox()
        if self._persistent and self._session is None:
            self._session = sandbox.session()
        try:
            ran = await (self._session or sandbox).run(code)
        except OSError as error:  # no code was run, which is not the model's mistake
            raise UserError(f"environment.options.python: {error}") from error
        if self._session is None:
            return ran.text
        return f"{ran.text}\n[the interpreter was started again: its variables are gone]" if ran.ended else ran.text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _sandbox(self) -> PythonSandbox:
        mine = _sandboxes.setdefault(asyncio.get_running_loop(), {})
        key = (self._limits, *self._options.values())
        if key not in mine:
            mine[key] = PythonSandbox(self._limits, **self._options)
        return mine[key]


async def check_python(options: Mapping[str, Any]) -> None:
    """Check options of `PythonTool` by running code with them.

    Raises:
        UserError: an option is unknown or has a wrong value, or the tool does not work on this machine.
    """
    for key in options:
        if key not in _OPTIONS:
            hint = nearest(key, _OPTIONS) or f"; it takes {', '.join(_OPTIONS)}"
            raise UserError(f"environment.options.python.{key}: no such option{hint}")
    try:
        tool = PythonTool(**options)
        try:
            await tool.python("None")
        finally:
            await tool.close()
    except (ValueError, TypeError) as error:
        raise UserError(f"environment.options.python: {error}") from error
