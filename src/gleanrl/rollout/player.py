"""Plays one episode: an environment and a sampler take turns until the episode ends.

The training loop, evaluation and demonstrations all use `Player.play`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from gleanrl.config.settings import ContextSettings
from gleanrl.protocols import Environment, EpisodeLost, ModelAddress, Observation, Sampler, SamplingParams, Session
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.rollout.context import make_context
from gleanrl.rollout.conversations import PolicyModel
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import ToolsUnknown
from gleanrl.schedule.timeline import BusyClock
from gleanrl.types import (
    LAST_OBSERVATION,
    START_TURNS,
    TURN_ORDER,
    Message,
    Score,
    Segment,
    StopReason,
    Task,
    Trajectory,
)
from gleanrl.utils.errors import UserError, describe

log = logging.getLogger(__name__)

# An episode is played again if the process of its sampler or environment has died. The number of attempts is limited,
# because the episode itself may be the cause.
MAX_ATTEMPTS = 5
# Seconds that a cancelled episode waits until its environment is closed. The environment may be in the middle of a slow
# step.
CLOSE_TIMEOUT_S = 1.0

# Environments that are still being closed. The set keeps the tasks alive, because the event loop itself keeps only weak
# references to tasks.
_closing: set[asyncio.Task[None]] = set()


class Endpoint(Protocol):
    """Opens an address at which an agent makes its model calls, such as `Endpoint.open` of the agent environment."""

    def __call__(
        self,
        answer: Callable[[ModelCall], Awaitable[ModelAnswer]],
        *,
        earn: Callable[[float, str | None], None],
        max_context: int | None = None,
        on_refusal: Callable[[Refused], None] | None = None,
    ) -> AbstractAsyncContextManager[ModelAddress]:
        """Open an address.

        ``answer`` answers model calls. ``earn`` takes turn rewards, each with the id of its answer or None for the
        latest. ``max_context`` is the number of tokens that the model's context can hold; None = not known.
        ``on_refusal`` is called with the error of each call that is refused.
        """
        ...


@dataclass(frozen=True, slots=True)
class Player:
    """Plays episodes. Its attributes are everything that an episode needs except the task."""

    environment: Callable[[Task], Environment]
    """Makes the environment of an episode, such as `Taskset.environment`."""
    sampler: Sampler
    """Generates the model's tokens."""
    renderer: Renderer
    """Converts messages to tokens."""
    context: ContextSettings
    """What the model sees of earlier turns, and the limits of an episode."""
    temperature: float
    """Sampling temperature."""
    max_context: int
    """Maximum number of tokens in the model's context."""
    environment_clock: BusyClock = field(default_factory=BusyClock)
    """Seconds in which at least one environment worked."""
    endpoint: Endpoint | None = None
    """Serves the policy to agents over HTTP, such as `gleanrl.environments.agent.endpoint.Endpoint.open`. Needed only
    for environments with agents."""

    async def play(
        self,
        task: Task,
        *,
        trajectory_id: str,
        seed: int,
        temperature: float | None = None,
        start: Segment = (),
    ) -> Trajectory:
        """Play ``task`` once and return the trajectory.

        If the environment raises an error, the trajectory's score is invalid. If the sampler raises an error, this
        method raises it. If either of them raises `EpisodeLost`, the episode is played again from its start, in all at
        most `MAX_ATTEMPTS` times. If the environment does not answer the actions of ``start`` with the observations in
        it, token for token, or if no turn is left after them, the episode is played again without ``start``.

        Args:
            trajectory_id: id of the trajectory that is returned.
            seed: seed of the sampler's session.
            temperature: sampling temperature; None = that of the player.
            start: turns of an earlier episode with which this one begins (`GroupSpec.start`).

        Raises:
            ToolsUnknown: the environment has tools, and the model's chat template does not support tools.
        """
        lost: EpisodeLost | None = None
        repeated = start
        for _ in range(MAX_ATTEMPTS):
            try:
                played = await self._attempt(task, trajectory_id, seed, temperature, repeated)
            except EpisodeLost as error:
                lost = error
            except _OtherStart:
                repeated = ()
            else:
                number = sum(turn.sampled for turn in repeated)
                return replace(played, info={**played.info, START_TURNS: number}) if start else played
        score = Score.failed(f"lost {MAX_ATTEMPTS} times: {lost}")
        return Trajectory(trajectory_id, task.id, (), score, StopReason.ERROR, {"turns": 0})

    async def _attempt(
        self, task: Task, trajectory_id: str, seed: int, temperature: float | None, start: Segment
    ) -> Trajectory:
        started = perf_counter()
        context = make_context(self.renderer, self.context)
        temperature = self.temperature if temperature is None else temperature
        turns, cut, environment_s = 0, 0, 0.0
        # The positions of the actions in ``start``, and the rewards that these have earned.
        actions = [position for position, turn in enumerate(start) if turn.sampled]
        earlier: list[float] = []
        agent: PolicyModel | None = None
        score: Score | None = None
        altered: str | None = None
        unseen: tuple[Message, ...] = ()  # the messages of the last observation, if the model did not see them
        async with AsyncExitStack() as opened, self.sampler.session(seed) as session:
            try:
                environment = self.environment(task)
                # The environment is closed after the session, because other episodes may wait until the session ends.
                opened.push_async_callback(_close, environment)
                call = environment.reset()
                while True:
                    asked = perf_counter()
                    with self.environment_clock:
                        observation = await call
                    environment_s += perf_counter() - asked
                    if observation.agent:
                        agent = self._model(session, seed, temperature)
                        asked = perf_counter()
                        try:
                            observation = await self._run_agent(environment, agent)
                        except (EpisodeLost, ToolsUnknown, TimeoutError, _SamplerFailed):
                            raise
                        except Exception:
                            if agent.limit is None:
                                raise
                            # The agent did not go on without the answer that a limit of the run has refused.
                            stop = agent.limit
                            score = await conclude_score(environment, stop, score)
                            break
                        finally:
                            environment_s += perf_counter() - asked - agent.sampling_s
                    score, unseen = observation.score or score, observation.messages
                    repeating = bool(start) and turns <= len(actions)  # the model has not sampled anything yet
                    if repeating and (observation.done or turns == self.context.max_turns):
                        raise _OtherStart  # the model would not sample anything
                    if repeating and turns:
                        earlier += [] if observation.reward is None else [observation.reward]
                    elif observation.reward is not None:
                        (context if agent is None else agent.conversations).earn(observation.reward)
                    if observation.done:
                        stop = (None if agent is None else agent.limit) or StopReason.DONE
                        break
                    if turns == self.context.max_turns:
                        stop = StopReason.MAX_TURNS
                        score = await conclude_score(environment, stop, score)
                        break
                    opening = task.prompt if turns == 0 else ()
                    context.observe((*opening, *observation.messages), observation.tools, observation.state)
                    unseen = ()
                    prompt = context.prompt()
                    if repeating:
                        action = actions[turns] if turns < len(actions) else len(start)
                        before = np.concatenate([turn.tokens for turn in start[:action]])
                        if not np.array_equal(prompt if action < len(start) else prompt[: before.size], before):
                            raise _OtherStart
                        if action < len(start):
                            turns += 1
                            call = environment.step(context.repeat(start[action].tokens))
                            continue
                    room = self.max_context - prompt.size
                    if room < 1:
                        stop = StopReason.CONTEXT_FULL
                        score = await conclude_score(environment, stop, score)
                        break
                    limit = min(room, self.context.max_tokens_per_turn)
                    params = SamplingParams(limit, context.stop_tokens, temperature)
                    try:
                        completion = await session.sample(prompt, params)
                    except Exception as error:
                        raise _SamplerFailed from error
                    turns, altered = turns + 1, altered or completion.altered
                    cut += completion.finish == "length"
                    call = environment.step(context.act(completion))
            except _SamplerFailed as error:
                raise error.__cause__ or error from None
            except (EpisodeLost, ToolsUnknown, _OtherStart):
                raise
            except TimeoutError as error:
                stop, score = StopReason.TIMEOUT, Score.failed(f"timeout: {error}")
            except Exception as error:
                stop, score = StopReason.ERROR, Score.failed(describe(error))
        segments, tools = context.segments(), context.tools
        order: list[int] = []  # the places in time of an agent's sampled turns
        if agent is not None:
            turns, cut, altered = agent.turns, agent.cut, agent.altered
            segments, tools = agent.conversations.segments(), agent.conversations.tools
            if not turns and stop is StopReason.DONE:
                _warn_of_no_answer(str(agent.refusal or ""))
            order = agent.conversations.order(segments)
            said = [turn for segment in segments for turn in segment if turn.sampled]
            last = said[order.index(max(order))].message["content"] if said else None
            if len(unseen) == 1 and unseen[0]["content"] == last:
                unseen = ()  # the agent returned the model's last answer
        info: dict[str, Any] = {
            "turns": turns,
            "cut_turns": cut,  # number of turns that a limit of tokens ended
            "environment_s": environment_s,
            "episode_s": perf_counter() - started,
        }
        if tools:
            # A renderer with the same tools is needed to render or parse messages of this trajectory again later.
            info["tools"] = list(tools)
        if unseen:
            info[LAST_OBSERVATION] = list(unseen)
        if altered is not None:
            info["altered_sampling"] = altered
        if order != sorted(order):
            info[TURN_ORDER] = order
        score = score or sum_of_rewards([*earlier, *(turn.reward for segment in segments for turn in segment)])
        if start and score.turns is not None:
            # The environment names the rewards of all turns; those of the start are context now.
            score = replace(score, turns=score.turns[len(actions) :])
        ending: Segment = ()
        if self.renderer.bodies and agent is None and stop not in (StopReason.ERROR, StopReason.TIMEOUT):
            with suppress(UserError):  # the chat template refuses the messages, and the model did not have to see them
                ending = context.ending(unseen)
        return Trajectory(trajectory_id, task.id, segments, score, stop, info, ending).scored(score)

    def _model(self, session: Session, seed: int, temperature: float) -> PolicyModel:
        return PolicyModel(
            self.renderer,
            session,
            seed=seed,
            temperature=temperature,
            max_context=self.max_context,
            max_tokens=self.context.max_tokens_per_turn,
            max_turns=self.context.max_turns,
        )

    async def _run_agent(self, environment: Environment, model: PolicyModel) -> Observation:
        """Run the environment's agent, whose calls ``model`` answers, and return the last observation.

        Raises:
            _SamplerFailed: an error of the model has ended the agent.
        """
        if self.endpoint is None:
            raise _SamplerFailed from UserError(
                "agents need an endpoint, which an environment pool has (ray.environments = 0)"
            )
        failures: list[Exception] = []
        async with self.endpoint(
            model.answer,
            earn=model.conversations.earn,
            max_context=self.max_context,
            on_refusal=model.refused,
        ) as address:
            running = asyncio.ensure_future(environment.run(address))

            def fail(error: Exception) -> None:
                failures.append(error)
                running.cancel()

            model.on_failure = fail
            try:
                return replace(await running, done=True)
            except BaseException:
                if failures:
                    raise _SamplerFailed from failures[0]
                raise


@lru_cache
def _warn_of_no_answer(refusal: str) -> None:
    """Log a warning, once for each ``refusal``, that an agent has had no answer of the model.

    ``refusal`` is the error of its first call; empty if it made none, because it may be calling another model.
    """
    if refusal:
        log.warning("all model calls of an agent were refused, so its episode trains nothing; the first: %s", refusal)
    else:
        log.warning(
            "an agent has ended without a call of the model, so its episode trains nothing; it must use the base URL "
            "and the API key that it gets"
        )


class _OtherStart(Exception):
    """Raised if an environment does not repeat the observations of a start."""


class _SamplerFailed(Exception):
    """Wraps an error of the sampler, so that it is not handled as an error of the environment."""


async def conclude_score(environment: Environment, stop: StopReason, score: Score | None) -> Score | None:
    """Return the score of an episode that has reached its limit of turns or of context; None if it has none.

    ``score`` is the last score of an observation. It is returned if it is valid. Otherwise the result is the score
    that `Environment.conclude` returns, or ``score`` if that method returns None.
    """
    if score is not None and score.valid:
        return score
    concluded = await environment.conclude(stop)
    return score if concluded is None else Score.of(concluded)


def sum_of_rewards(rewards: Iterable[float | None]) -> Score:
    """Return the score of an episode whose environment gave no score: the sum of its turn rewards, if it has any."""
    given = [reward for reward in rewards if reward is not None]
    return Score(math.fsum(given)) if given else Score.failed("the environment gave no score")


async def _close(environment: Environment) -> None:
    """Close the environment. Errors are ignored, because the episode is over.

    If the episode was cancelled, return after at most `CLOSE_TIMEOUT_S` seconds; closing then continues in a task of
    its own.
    """

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
