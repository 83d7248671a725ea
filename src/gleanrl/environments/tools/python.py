"""A tool that runs Python code in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gleanrl.environments.tools.sandbox.client import Isolation, PythonSandbox, Session
from gleanrl.environments.tools.sandbox.limits import Limits
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

_OPTIONS = ("isolation", "packages", "persistent", "concurrency", *Limits.__slots__)


class PythonTool:
    """The tool ``python(code)``, for one episode.

    Args:
        persistent: calls of the episode share one interpreter and its variables; else each has its own.
        isolation, packages, concurrency: as of `gleanrl.environments.tools.sandbox.PythonSandbox`.
        limits: as of `gleanrl.environments.tools.sandbox.Limits`, by name.
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
        self._settings = (Limits(**limits), isolation, packages, concurrency)
        self._persistent = persistent
        self._session: Session | None = None

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of a last expression.

        Args:
            code: the program.
        """
        sandbox = _sandbox(self._settings)
        if not self._persistent:
            return (await sandbox.run(code)).text
        if self._session is None:
            self._session = sandbox.session()
        ran = await self._session.run(code)
        return f"{ran.text}\n[the interpreter begins anew: its variables are gone]" if ran.ended else ran.text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @staticmethod
    async def _check(options: Mapping[str, Any]) -> None:
        """Whether it will work here. Raises `UserError`."""
        for key in options:
            if key not in _OPTIONS:
                hint = nearest(key, _OPTIONS) or f"; it takes {', '.join(_OPTIONS)}"
                raise UserError(f"environment.options.python.{key}: no such option{hint}")
        try:
            await _sandbox(PythonTool(**options)._settings).start()
        except (ValueError, TypeError) as error:
            raise UserError(f"environment.options.python: {error}") from error


@dataclass(eq=False)
class _Shared:
    """The sandboxes that all episodes of an event loop share; they end with it, for its end cancels its tasks."""

    sandboxes: dict[Any, PythonSandbox] = field(default_factory=dict)
    keeper: asyncio.Task[None] | None = None

    async def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await loop.create_future()
        finally:
            _all.pop(loop, None)
            for sandbox in self.sandboxes.values():
                await sandbox.close()


_all: dict[asyncio.AbstractEventLoop, _Shared] = {}


def _sandbox(settings: tuple[Limits, Isolation, bool, int | None]) -> PythonSandbox:
    """One for all episodes of an event loop."""
    for closed in [loop for loop in _all if loop.is_closed()]:  # without having been shut down
        for sandbox in _all.pop(closed).sandboxes.values():
            sandbox.abandon()
    loop = asyncio.get_running_loop()
    if loop not in _all:
        shared = _all[loop] = _Shared()
        shared.keeper = loop.create_task(shared.keep(loop))
    mine = _all[loop].sandboxes
    if settings not in mine:
        limits, isolation, packages, concurrency = settings
        mine[settings] = PythonSandbox(limits, isolation=isolation, packages=packages, concurrency=concurrency)
    return mine[settings]
