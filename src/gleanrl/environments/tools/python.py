"""A tool that runs Python code in a sandbox."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any

from gleanrl.errors import UserError
from gleanrl.importing import nearest
from gleanrl.sandbox.client import Isolation, PythonSandbox, Session
from gleanrl.sandbox.limits import Limits

_OPTIONS = ("isolation", "packages", "persistent", "concurrency", *Limits.__slots__)
_shared: weakref.WeakKeyDictionary[Any, dict[Any, PythonSandbox]] = weakref.WeakKeyDictionary()


class PythonTool:
    """The tool ``python(code)``, for one episode.

    Args:
        persistent: calls of the episode share one interpreter and its variables; else each has its own.
        isolation, packages, concurrency: as of `gleanrl.sandbox.PythonSandbox`.
        limits: as of `gleanrl.sandbox.Limits`, by name.
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


def _sandbox(settings: tuple[Limits, Isolation, bool, int | None]) -> PythonSandbox:
    """One for all episodes of an event loop; its server ends when the loop is gone."""
    mine = _shared.setdefault(asyncio.get_running_loop(), {})
    if settings not in mine:
        limits, isolation, packages, concurrency = settings
        mine[settings] = PythonSandbox(limits, isolation=isolation, packages=packages, concurrency=concurrency)
    return mine[settings]
