"""Steps Gymnasium environments in action chunks.

This module must not import torch, which takes seconds: with ``vectorization = "async"``, every environment process
imports the module.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from gleanrl.embodied.chunks import ChunkStep, Floats, Progress
from gleanrl.utils.errors import UserError, raised_at
from gleanrl.utils.seeding import derive


class Chunked(gymnasium.Wrapper[Floats, Floats, Any, Any]):
    """A wrapper that executes a chunk of C actions per step and starts a new episode itself when one ends.

    Actions are in [-1, 1] and are scaled to the range of the wrapped environment's actions. Each episode has its own
    seed.

    The wrapper reports the end of an episode only in ``info``. As ``terminated`` and ``truncated`` it always returns
    False, so that the autoreset of gymnasium's vector environment never resets it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], chunk: int) -> None:
        super().__init__(env)
        box = env.action_space
        if not isinstance(box, spaces.Box) or not (np.isfinite(box.low).all() and np.isfinite(box.high).all()):
            name = env.spec.id if env.spec is not None else type(env).__name__
            raise UserError(f"{name}: its actions are {box}; a bounded Box is needed")
        self._box, self._chunk = box, chunk
        # The sum of two whole numbers may be too large for their dtype.
        self._whole = box.dtype.kind in "iu"
        low, high = (edge.reshape(-1).astype(np.float64 if self._whole else box.dtype) for edge in (box.low, box.high))
        self._middle, self._reach = (low + high) / 2, (high - low) / 2
        size = spaces.flatdim(env.observation_space)
        self.action_space = spaces.Box(-1.0, 1.0, (chunk * len(low),), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.begin_at: Progress | None = None  # state to which the next `reset` restores the environment
        self._stream = self._episode = 0
        self._return, self._length = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        """Start episode 0 of the random stream ``seed`` (None = of the stream in use), or restore the state in
        ``begin_at``.

        A state is restored by starting its episode and executing the chunks that were executed in it before.
        """
        at, self.begin_at = self.begin_at, None
        self._stream = self._stream if seed is None else seed
        self._episode = at.episode if at is not None else 0
        obs = self._begin()
        for actions in at.actions if at is not None else ():
            obs, _, _, _, info = self.step(actions)
            if info["ended"]:
                # When the chunk was executed for the first time, the episode did not end, so the environment is not
                # deterministic. `Environments.reset` notices that because the observation differs.
                break
        return obs, {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        rewards = np.zeros(self._chunk, np.float32)
        terminations, truncations = np.zeros(self._chunk, bool), np.zeros(self._chunk, bool)
        obs: Any = None
        for i, own in enumerate(action.reshape(self._chunk, -1)):
            scaled = self._middle + self._reach * np.clip(own, -1.0, 1.0)
            if self._whole:
                scaled = np.rint(scaled)
            acted = scaled.reshape(self._box.shape).astype(self._box.dtype)
            obs, reward, terminations[i], truncations[i], _ = self.env.step(acted)
            rewards[i] = reward
            self._return += float(reward)
            self._length += 1
            if terminations[i] or truncations[i]:
                break
        flat = self._flat(obs)
        ended = bool(terminations.any() or truncations.any())
        info = {
            "next_obs": flat,
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "ended": ended,
            "return": self._return,
            "length": self._length,
        }
        if ended:
            self._episode += 1
            flat = self._begin()
        return flat, float(rewards.sum()), False, False, info

    def _begin(self) -> Floats:
        self._return, self._length = 0.0, 0
        obs, _ = self.env.reset(seed=derive(self._stream, "episode", self._episode) % 2**31)
        return self._flat(obs)

    def _flat(self, obs: Any) -> Floats:
        return np.asarray(spaces.flatten(self.env.observation_space, obs), np.float32)


class Environments:
    """B copies of one Gymnasium environment that are stepped together.

    Args:
        id: id of the environment, for `gymnasium.make`.
        options: further arguments of `gymnasium.make`.
        count: B, the number of environments.
        chunk: C, the number of actions in a chunk.
        seed: seed of the random streams. The start of episode n of environment b depends only on ``seed``, n and b.
        vectorization: ``sync`` steps the environments one after the other, ``async`` steps each in its own process.

    Raises:
        UserError: there is no such environment, a package is missing, or its action space is not a bounded Box.
    """

    def __init__(
        self, id: str, options: Mapping[str, Any], *, count: int, chunk: int, seed: int, vectorization: str = "sync"
    ) -> None:
        try:
            made = gymnasium.make_vec(
                id,
                num_envs=count,
                vectorization_mode=vectorization,
                vector_kwargs={"context": "forkserver"} if vectorization == "async" else {},
                wrappers=[partial(Chunked, chunk=chunk)],
                disable_env_checker=True,
                **options,
            )
        # An environment reports a wrong value of an option as a ValueError, an AssertionError or an OSError.
        except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError, OSError) as error:
            raise UserError(f"environment {id!r}: {' '.join(str(error).split())}{raised_at(error)}") from None
        self._envs: SyncVectorEnv | AsyncVectorEnv = cast(Any, made)
        self.id, self.count, self.chunk = id, count, chunk
        observed, acted = self._envs.single_observation_space, self._envs.single_action_space
        assert isinstance(observed, spaces.Box)
        assert isinstance(acted, spaces.Box)
        self.obs_size, self.action_size = observed.shape[0], acted.shape[0]  # D, C * A
        spec = self._envs.spec
        limit = options.get("max_episode_steps", spec.max_episode_steps if spec is not None else None)
        self.max_episode_steps = max(limit or 0, 0)  # the option -1 stands for no limit
        self._seeds: list[int | None] = [derive(seed, "environment", index) for index in range(count)]
        self._episodes = [0] * count
        # The action chunks of each current episode so far, in an array with room for more, and their number. `progress`
        # returns views of the arrays, because copies would take ever longer in an episode that does not end.
        self._since: list[Floats] = [np.empty((0, self.action_size), np.float32)] * count
        self._counts = [0] * count
        self._obs = np.zeros((count, self.obs_size), np.float32)

    def reset(self, progress: Sequence[Progress] | None = None) -> Floats:
        """Reset each environment to the start of episode 0, or to its state in ``progress``.

        Returns the observations ``[B, D]``. An environment that is not deterministic cannot be restored. It starts its
        next episode instead, with a warning.
        """
        if progress is not None:
            self._envs.set_attr("begin_at", list(progress))
        self._obs, _ = self._envs.reset(seed=self._seeds)
        if progress is not None:
            same = [np.array_equal(obs, own.obs) for obs, own in zip(self._obs, progress, strict=True)]
            if not all(same):
                warnings.warn(f"{self.id} is not deterministic: unfinished episodes are restarted", stacklevel=2)
                progress = [
                    own if again else Progress(own.episode + 1, own.actions[:0], own.obs)
                    for own, again in zip(progress, same, strict=True)
                ]
                self._envs.set_attr("begin_at", list(progress))
                self._obs, _ = self._envs.reset(seed=self._seeds)
        self._episodes = [own.episode for own in progress] if progress is not None else [0] * self.count
        none = np.empty((0, self.action_size), np.float32)
        self._since = [own.actions for own in progress] if progress is not None else [none] * self.count
        self._counts = [len(actions) for actions in self._since]
        return self._obs

    def step(self, actions: Floats) -> ChunkStep:
        """Execute action chunks ``[B, C * A]`` in [-1, 1], which are scaled to the range of the actions."""
        self._obs, _, _, _, info = self._envs.step(actions)
        for i, ended in enumerate(info["ended"]):
            if ended:
                self._episodes[i] += 1
                self._since[i], self._counts[i] = self._since[i][:0], 0
                continue
            if self._counts[i] == len(self._since[i]):
                room = np.empty((max(self._counts[i], 64), self.action_size), np.float32)
                self._since[i] = np.concatenate([self._since[i], room])
            self._since[i][self._counts[i]] = actions[i]
            self._counts[i] += 1
        return ChunkStep(
            info["next_obs"],
            self._obs,
            info["rewards"],
            info["terminations"],
            info["truncations"],
            tuple(info["return"][info["ended"]].tolist()),
            tuple(info["length"][info["ended"]].tolist()),
        )

    def progress(self) -> list[Progress]:
        """Return the state of each environment, from which `reset` can restore it."""
        return [
            Progress(self._episodes[i], self._since[i][: self._counts[i]], self._obs[i].copy())
            for i in range(self.count)
        ]

    def close(self) -> None:
        """Close the environments, and end their processes."""
        self._envs.close()
