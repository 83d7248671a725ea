"""An environment for the embodied tests, whose episodes terminate or are truncated within a few steps."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gleanrl.embodied.chunks import Floats

ID = "tests.embodied.world:Drift-v0"
LIMIT = 7  # steps after which an episode is truncated


class Drift(gymnasium.Env[dict[str, Any], Any]):
    """A point in the plane, moved by noise and by the action. The episode terminates ``wide`` away from the origin.

    With ``repeats=False`` the environment ignores its seed.
    """

    observation_space = spaces.Dict({"at": spaces.Box(-99, 99, (2,)), "steps": spaces.Box(0, 99, (1,))})
    action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 4.0], np.float32))

    def __init__(self, wide: float = 4.0, repeats: bool = True) -> None:
        self.wide, self.repeats = wide, repeats
        self.at, self.steps = np.zeros(2), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict]:
        super().reset(seed=seed if self.repeats else None)
        self.at, self.steps = self.np_random.normal(size=2), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.at = self.at + [0.5, 0.25] * action + self.np_random.normal(size=2)
        self.steps += 1
        return self._seen(), float(self.at.sum()), bool(abs(self.at).max() > self.wide), False, {}

    def _seen(self) -> dict[str, Any]:
        return {"at": self.at.astype(np.float32), "steps": np.array([self.steps], np.float32)}


gymnasium.register("Drift-v0", entry_point=f"{__name__}:Drift", max_episode_steps=LIMIT)


def still(obs: Floats) -> Floats:
    """An expert for chunks of two actions, which moves the point back to the origin."""
    action = np.clip(np.stack([-obs[:, 0] / 2, -obs[:, 1] - 1], axis=1), -1, 1)
    return np.concatenate([action, action], axis=1).astype(np.float32)
