"""Scripted experts, for demonstrations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gleanrl.embodied.chunks import Floats
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.text import nearest

Expert = Callable[[Floats], Floats]  # observations [B, D] -> actions [B, C * A] in [-1, 1]


def pendulum(obs: Floats) -> Floats:
    """Swings ``Pendulum-v1`` up by pumping energy, and holds it there."""
    cosine, sine, speed = obs[:, 0], obs[:, 1], obs[:, 2]
    energy = speed**2 / 6 + 5 * (cosine - 1)  # m = l = 1, inertia 1/3, g / 2 * l = 5; 0 where it stands upright
    pump = np.where(energy < 0, 2.0, -2.0) * np.where(speed >= 0, 1.0, -1.0)
    hold = -10 * np.arctan2(sine, cosine) - 2.5 * speed
    torque = np.where((cosine > 0.9) & (np.abs(speed) < 3), hold, pump)
    return (np.clip(torque, -2, 2) / 2).astype(np.float32)[:, None]


def mountain_car(obs: Floats) -> Floats:
    """Swings the car of ``MountainCarContinuous-v0`` up: always the way it is moving."""
    return np.where(obs[:, 1:] >= 0, 1.0, -1.0).astype(np.float32)


EXPERTS: dict[str, Expert] = {"mountain_car": mountain_car, "pendulum": pendulum}


def find(name: str) -> Expert:
    """By name or import path. Raises `UserError` where there is none."""
    if name in EXPERTS:
        return EXPERTS[name]
    if ":" in name:
        return load_object(name)
    hint = nearest(name, EXPERTS) or f"; known: {', '.join(EXPERTS)}, or an import path"
    raise UserError(f"demonstrations.expert = {name!r}: no such expert{hint}")
