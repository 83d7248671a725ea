"""Plays one episode: an environment and a sampler take turns until the episode ends.

The training loop, evaluation and demonstrations all play through `Player.play`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gleanrl.config.settings import ContextSettings
from gleanrl.protocols import Environment, EpisodeLost, Sampler, SamplingParams
from gleanrl.rollout.context import make_context
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import ToolsUnknown
from gleanrl.schedule.timeline import BusyClock
from gleanrl.types import Score, StopReason, Task, Trajectory

MAX_ATTEMPTS = 5  # an episode that loses its sampler or environment may be the cause itself, so attempts are limited
CLOSE_TIMEOUT_S = 1.0  # wait for a cancelled episode's environment to close, which may be in the middle of a slow step

_closing: set[asyncio.Task[None]] = set()  # strong references, because the event loop keeps only weak ones to tasks


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that an episode needs except its task."""

    environment: Callable[[Task], Environment]
    sampler: Sampler
    renderer: Renderer
    context: ContextSettings
    temperature: float
    max_context: int  # the model's limit, in tokens
    environment_clock: BusyClock = field(default_factory=BusyClock)  # time in which at least one environment worked

    async def play(self, task: Task, *, trajectory_id: str, seed: int, temperature: float | None = None) -> Trajectory:
        """Play ``task`` once.

        An environment that raises makes the trajectory's score invalid; a sampler that raises makes this method raise.
        If either reports `EpisodeLost`, the episode starts again, at most `MAX_ATTEMPTS` times in all.
        """
        lost: EpisodeLost | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(task, trajectory_id, seed, temperature)
            except EpisodeLost as error:
                lost = error
        score = Score.failed(f"lost {MAX_ATTEMPTS} times: {lost}")
        return Trajectory(trajectory_id, task.id, (), score, StopReason.ERROR, {"turns": 0})

    async def _attempt(self, task: Task, trajectory_id: str, seed: int, temperature: float | None) -> Trajectory:
        started = perf_counter()
        context = make_context(self.renderer, self.context)
        temperature = self.temperature if temperature is None else temperature
        turns, cut, environment_s = 0, 0, 0.0
        score = Score.failed("the environment gave no score")
        altered: str | None = None
        async with AsyncExitStack() as opened, self.sampler.session(seed) as session:
            try:
                environment = self.environment(task)
                opened.push_async_callback(_close, environment)  # closed after the session, which others may wait for
                call = environment.reset()
                while True:
                    asked = perf_counter()
                    with self.environment_clock:
                        observation = await call
                    environment_s += perf_counter() - asked
                    score = observation.score or score
                    if observation.done:
                        stop = StopReason.DONE
                        break
                    if turns == self.context.max_turns:
                        stop = StopReason.MAX_TURNS
                        score = await conclude_score(environment, stop, score)
                        break
                    opening = task.prompt if turns == 0 else ()
                    context.observe((*opening, *observation.messages), observation.tools)
                    prompt = context.prompt()
                    room = self.max_context - prompt.size
                    if room < 1:
                        stop = StopReason.CONTEXT_FULL
                        score = await conclude_score(environment, stop, score)
                        break
                    limit = min(room, self.context.max_tokens_per_turn)
                    params = SamplingParams(limit, self.renderer.stop_tokens, temperature)
                    try:
                        completion = await session.sample(prompt, params)
                    except Exception as error:
                        raise _SamplerFailed from error
                    turns, altered = turns + 1, altered or completion.altered
                    cut += completion.finish == "length"
                    call = environment.step(context.act(completion))
            except _SamplerFailed as error:
                raise error.__cause__ or error from None
            except (EpisodeLost, ToolsUnknown):
                raise
            except TimeoutError as error:
                stop, score = StopReason.TIMEOUT, Score.failed(f"timeout: {error}")
            except Exception as error:
                stop, score = StopReason.ERROR, Score.failed(f"{type(error).__name__}: {error}")
        info: dict[str, Any] = {
            "turns": turns,
            "cut_turns": cut,  # turns that ended at a token limit
            "environment_s": environment_s,
            "episode_s": perf_counter() - started,
        }
        if context.tools:
            info["tools"] = list(context.tools)  # needed to render the opening again
        if altered is not None:
            info["altered_sampling"] = altered
        return Trajectory(trajectory_id, task.id, context.segments(), score, stop, info)


class _SamplerFailed(Exception):
    """Carries a sampler's error past the handler of environment errors."""


async def conclude_score(environment: Environment, stop: StopReason, score: Score) -> Score:
    """Return the score of an episode that ran out of turns or context.

    This is the last observation's score if it is valid, else the score that the environment concludes with.
    """
    if score.valid:
        return score
    return await environment.conclude(stop) or score


async def _close(environment: Environment) -> None:
    """Close the environment. Errors are ignored, since the episode is over; a cancelled episode waits only briefly."""

    async def close() -> None:
        with suppress(Exception):
            await environment.close()

    episode = asyncio.current_task()
    if episode is None or not episode.cancelling():
        await close()
        return
    closing = asyncio.create_task(close())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
