"""Stores expert demonstrations in the experience pool of a run. Called by `gleanrl pool seed`.

The run's player plays an episode for each demonstration, in which the sampler returns the expert's actions. A stored
trajectory therefore has the same prompts, chat template and tokens as an episode of the run's agent.

The behaviour log-probs of the expert are unknown. The policy in the run's newest checkpoint computes the log-probs that
are stored instead. An importance weight of such a trajectory therefore measures how far the trained policy has moved
from that checkpoint. It does not correct the bias that arises because the expert, not the policy, chose the actions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gleanrl.algorithms.batch import build_samples
from gleanrl.config import loading as configuration
from gleanrl.environments.pool import EnvironmentFailure
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool.admission import DEMONSTRATION
from gleanrl.experience.pool.pool import Incoming
from gleanrl.experience.pool.transfer import Intake, Moved
from gleanrl.experience.replay.updates import replayed_group
from gleanrl.learners.torch import TorchLearner
from gleanrl.protocols import Reward, Tools
from gleanrl.rollout.expert import opening_of, play_expert
from gleanrl.rollout.player import Player
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.local import Builder
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.rewards import make_scorer, reward_source
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import LAST_OBSERVATION, TURN_ORDER, IntArray, Message, Score, Task, Trajectory
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

_TRIES = 3  # the expert attempts at most this many times as many episodes as demonstrations are wanted
_AT_ONCE = 64  # number of demonstrations for which the policy computes log-probs in one call


def seed_from_demonstrations(
    pool: ExperiencePool, folder: RunFolder, count: int, *, step: int = 0, console: Progress, label: str | None = None
) -> tuple[Moved, int]:
    """Record up to ``count`` successful demonstrations of the training tasks of the run ``folder`` in ``pool``.

    The environment's expert acts, with the noise of the warm start (``warm_start.noise``). The episodes are played and
    scored as the run's own episodes are. ``step`` is the step that is stored with the demonstrations, from which the
    pool counts their age. `gleanrl pool seed` passes the newest step that the pool contains.
    ``label`` is the source that is recorded for them; None = ``demonstrations``.

    Returns:
        The numbers of trajectories stored and left out, and the step of the checkpoint whose policy computed the
        log-probs.

    Raises:
        UserError: the environment has no expert, the run has no checkpoint, or no demonstration succeeds when it is
            played as an episode of the run's agent.
    """
    config = configuration.load(str(folder.config_path))
    found = Checkpoints(folder.checkpoints_path, keep=config.checkpoint.keep).latest()
    if found is None:
        raise UserError(f"{folder.path} has no checkpoint yet, whose policy could say how likely a demonstration is")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    scorer = make_scorer(config.reward)
    prepared = prepare(config, console, trains=False, restored=True)
    if not prepared.taskset.has_expert:
        raise UserError(f"environment {config.environment.name!r} has no expert to demonstrate (`has_expert` is false)")
    builder = Builder(config, folder, prepared, console, scorer)
    learner = builder.learner(None, None, trains=False)
    checkpoint, state = found
    learner.load(checkpoint)
    seeding = _Seeding(builder, learner, pool, int(state["step"]), step, label or "demonstrations")
    return asyncio.run(seeding.run(count, console)), seeding.policy


_KEPT = ("tools", TURN_ORDER, LAST_OBSERVATION)  # what is kept of the ``info`` of a demonstration


@dataclass(frozen=True)
class _Seeding:
    builder: Builder
    learner: TorchLearner
    pool: ExperiencePool
    policy: int  # step of the checkpoint whose policy computes the log-probs
    step: int  # step that is stored with the demonstrations, from which the pool counts their age
    source: str  # source that is recorded for the demonstrations

    async def run(self, count: int, console: Progress) -> Moved:
        config, prepared = self.builder.config, self.builder.prepared
        taskset = prepared.taskset
        waiting: list[tuple[Task, Trajectory]] = []
        good, left_out = 0, Counter[str]()
        no_expert: NoExpert | None = None
        async with (
            self.builder.environment_pool() as environments,
            reward_source(config.reward, None, self.builder.scorer) as reward,
        ):
            player = self.builder.player(environments, _make_speaker(()))
            with Intake(self.pool, self.source) as intake, console.stage("demonstrations", count) as stage:
                for attempt in range(_TRIES * count):
                    if good == count:
                        break
                    task = prepared.train[attempt % len(prepared.train)]
                    seed = derive(config.run.seed, "demonstrations for the pool", attempt)
                    try:
                        expert = taskset.agent_expert(task, seed=seed, noise=config.warm_start.noise)
                        if expert is None:
                            said, given = taskset.demonstrate(task, seed=seed, noise=config.warm_start.noise)
                            tools = taskset.tools(task)
                            said = said[opening_of(task, said) :]
                            answers = [(message, tools) for message in said if message["role"] == "assistant"]
                        else:
                            environment = environments.environment(task)
                            calls, given = await play_expert(environment, environments.endpoint.open, expert)
                            answers = [(messages[-1], tools) for messages, tools in calls]
                    except EnvironmentFailure as error:
                        left_out[str(error)] += 1
                        continue
                    except NoExpert as error:
                        # In a mixture of environments, tasks of another environment may still have an expert.
                        no_expert = error
                        continue
                    score = Score(1.0) if given is None else Score.of(given)
                    if not (score.valid and score.value > 0):
                        continue
                    name = f"{DEMONSTRATION}/{task.id}/{attempt}"
                    played = await _play(player, task, answers, name, seed, reward.train)
                    if isinstance(played, str):
                        left_out[played] += 1
                        continue
                    if not played.score.reaches(self.pool.settings.success_threshold):
                        left_out["no success"] += 1
                        continue
                    good += 1
                    stage.advance()
                    waiting.append((task, played))
                    if len(waiting) == _AT_ONCE:
                        await self._store(intake, waiting)
                        waiting = []
                await self._store(intake, waiting)
        intake.moved.left_out += left_out
        if not good:
            why = f" ({left_out.most_common(1)[0][0]})" if left_out else ""
            none = f"no demonstration of environment {config.environment.name!r} is one for this agent{why}"
            raise no_expert if no_expert and not left_out else UserError(none)
        return intake.moved

    async def _store(self, intake: Intake, demonstrations: Sequence[tuple[Task, Trajectory]]) -> None:
        """Compute the policy's log-probs for the demonstrations and pass both to ``intake``, which stores them."""
        if not demonstrations:
            return
        groups = [replayed_group(task, [trajectory]) for task, trajectory in demonstrations]
        built = build_samples(groups, self.builder.max_context)
        scores = await self.learner.logprobs(built.samples)
        logprobs: list[list[np.ndarray]] = [[] for _ in demonstrations]
        entropies: list[list[np.ndarray]] = [[] for _ in demonstrations]
        for sample, score in zip(built.samples, scores, strict=True):
            logprobs[sample.group].append(score.logprobs[sample.mask])
            entropies[sample.group].append(score.entropy[sample.mask])
        for (task, trajectory), own, entropy in zip(demonstrations, logprobs, entropies, strict=True):
            # `own` has one log-prob for each sampled token of the trajectory, in the order of its turns.
            start, segments = 0, []
            recorded_logprobs = np.concatenate(own).astype(np.float32)
            for segment in trajectory.segments:
                turns = []
                for turn in segment:
                    if turn.sampled:
                        end = start + turn.tokens.size
                        turn = replace(turn, logprobs=recorded_logprobs[start:end], version=self.policy)
                        start = end
                    turns.append(turn)
                segments.append(tuple(turns))
            info = {
                "turns": trajectory.info["turns"],
                "origin": DEMONSTRATION,
                "scored_by": f"{self.builder.config.run.name}, step {self.policy}",
                "policy_entropy": float(np.concatenate(entropy).mean(dtype=np.float64)),
                **{key: value for key in _KEPT if (value := trajectory.info.get(key))},
            }
            recorded = replace(trajectory, segments=tuple(segments), info=info)
            temperature = self.builder.config.sampler.temperature
            intake.take(Incoming(task, recorded, self.step, temperature, self.step, source=self.source))


async def _play(
    player: Player, task: Task, answers: Sequence[tuple[Message, Tools]], name: str, seed: int, reward: Reward
) -> Trajectory | str:
    """Play an episode of ``task`` in which the model's messages are ``answers``, one for each turn, with its tools.

    Returns the trajectory, scored by ``reward``. If the episode cannot be used as a demonstration, returns the reason
    as text instead.
    """
    words = [player.renderer.with_tools(tools).spoken(answer) for answer, tools in answers]
    speaker = _make_speaker(words)
    try:
        trajectory = await replace(player, sampler=speaker).play(task, trajectory_id=name, seed=seed)
    except _Over:
        return "its episode goes on after the demonstration"
    if not trajectory.score.valid:
        return trajectory.score.explanation or "it could not be scored"
    if any(own.size > params.max_tokens for own, (_, params, _) in zip(words, speaker.calls, strict=False)):
        return "it says more at once than context.max_tokens_per_turn or the model's context allows"
    if len(speaker.calls) < len(words):
        return "its episode ends before the demonstration does"
    return trajectory.scored(await reward.score(task, trajectory))


class _Over(Exception):
    """Raised by a scripted sampler when the episode requests another answer after the last one."""


def _make_speaker(words: Sequence[IntArray]) -> ScriptedSampler:
    """Make a sampler that returns the token sequences in ``words`` one after another and ignores the prompts."""
    left = iter(words)

    def script(prompt: IntArray, seed: int) -> list[int]:
        tokens = next(left, None)
        if tokens is None:
            raise _Over
        return tokens.tolist()

    return ScriptedSampler(script)
