"""Where a reward runs: on the event loop, in threads, in processes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from gleanrl.rewards.request import Request
from gleanrl.rewards.workers import Processes, Threads
from gleanrl.types import Score, Task

if TYPE_CHECKING:
    from gleanrl.rewards.forms import Form
    from gleanrl.rewards.journal import Journal

    Spec = Callable[[], Form]


class OnLoop:
    """Scores by an async reward, on the event loop."""

    def __init__(self, spec: Spec, form: Form) -> None:
        self.spec, self.form = spec, form
        self.version = form.version
        self.finishes = form.finishes
        self.sets_limits = form.sets_limits
        slots = getattr(form.made, "slots", None)
        self.slots: int | None = slots if isinstance(slots, int) else None  # calls at once, None = no limit
        self.keeps_time = getattr(form.made, "keeps_time", False) is True  # whether it ends what takes too long itself

    async def __call__(self, request: Request) -> Score:
        try:
            return self.form.said(self.form.read(await self.run("score", request)))
        except Exception as error:
            if (told := self.form.told(error)) is error:
                raise
            raise told from None

    async def finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        try:
            return self.form.merged(scores, await self.run("finish", task, scores))
        except Exception as error:
            if (told := self.form.told(error)) is error:
                raise
            raise told from None

    def run(self, method: str, *args: Any) -> Awaitable[Any]:
        """What a method of the form returns."""
        return awaited(getattr(self.form, method)(*args))  # no coroutine more than it takes: thousands wait here

    def use_journal(self, journal: Journal | None) -> None:
        if (use := getattr(self.form.made, "use_journal", None)) is not None and self.form.asynchronous:
            use(journal)

    async def aclose(self) -> None:
        await self.form.aclose()


class InThreads(OnLoop):
    """Scores by a sync reward, in threads."""

    def __init__(self, spec: Spec, form: Form, threads: Threads) -> None:
        super().__init__(spec, form)
        self.threads, self.slots, self.keeps_time = threads, threads.count, False

    async def run(self, method: str, *args: Any) -> Any:
        return await awaited(await self.threads.call(getattr(self.form, method), *args))

    async def aclose(self) -> None:
        self.threads.shutdown()
        await self.form.aclose()


class InProcesses(OnLoop):
    """Scores by a sync reward in processes of its own."""

    def __init__(self, spec: Spec, form: Form, processes: Processes, workers: int) -> None:
        super().__init__(spec, form)
        self.processes, self.slots, self.keeps_time = processes, workers, True

    async def run(self, method: str, *args: Any) -> Any:
        return await self.processes.call(method, *args)

    async def aclose(self) -> None:
        await self.processes.close()
        await self.form.aclose()


async def awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
