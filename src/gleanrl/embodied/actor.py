"""The learning side: stores trajectories in the buffer and trains on its samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gleanrl.buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.embodied.chunks import Progress
from gleanrl.embodied.rollout import Rollout, Weights
from gleanrl.embodied.sac import FIELDS, SAC, Transitions
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

STATE = "learner.pt"
BUFFERS = "buffer"


class ActorWorker:
    """SAC with its buffer, and a second buffer of demonstrations if there are any.

    Args:
        sac: the learner.
        buffer: trajectories of the policy.
        demonstrations: trajectories of an expert.
        config: of the run.
    """

    def __init__(
        self,
        sac: SAC,
        buffer: TrajectoryReplayBuffer,
        demonstrations: TrajectoryReplayBuffer | None,
        config: EmbodiedConfig,
    ) -> None:
        self.sac, self.buffer, self.demonstrations, self._config = sac, buffer, demonstrations, config
        share = config.demonstrations.share if demonstrations is not None else 0.0
        self.source = buffer if demonstrations is None else MixedReplayBuffer(buffer, demonstrations, share)
        self._own, self._shown = MixedReplayBuffer.divide(
            config.learner.batch, share
        )  # chunk steps of a batch, by where they come from
        self.step = 0  # trajectories learned from
        self.progress: Sequence[Progress] | None = None  # of the environments after the last of them
        self.published: deque[Weights] = deque(maxlen=config.schedule.lag + 1)
        self._publish()

    def check(self) -> None:
        """Raise `UserError` where the demonstrations cannot fill their part of a batch."""
        if self.demonstrations is not None and (there := self.demonstrations.window_samples) < self._shown:
            newest, batch = self._config.demonstrations.newest, self._config.learner.batch
            chosen = f"the newest {newest} trajectories" if newest else "the demonstrations"
            raise UserError(
                f"{chosen} hold {there} chunk steps, and a batch takes {self._shown}: show more, or lower "
                f"demonstrations.share = {self._config.demonstrations.share:g} or learner.batch = {batch}"
            )

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Store a trajectory, make the updates that are due, publish the policy, and return the step's metrics."""
        self.buffer.add_trajectories([rollout.trajectory])
        due = self.updates_due(self.step)
        totals: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(derive(self._config.run.seed, "update", self.step))
        settings = self._config.learner
        for _ in range(due):
            batch = self.source.sample(settings.batch, fields=FIELDS)
            losses = self.sac.update(Transitions.of(batch, settings.gamma, self.sac.device), generator)
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value
        self.step += 1
        self.progress = rollout.progress
        self._publish()
        metrics = {name: float(value) / due for name, value in totals.items()}
        return {**metrics, "updates/done": due, **self._gauges(rollout)}

    def updates_due(self, step: int) -> int:
        """Return the updates due after trajectory ``step``: 0 in the warm-up and until the buffer can fill a batch."""
        config = self._config
        rows, ratio = config.rows_per_step, config.learner.update_ratio
        learned = step - config.schedule.warmup
        if learned < 0 or self.buffer.window_samples < self._own:
            return 0
        return int((learned + 1) * rows * ratio) - int(learned * rows * ratio)

    def _gauges(self, rollout: Rollout) -> dict[str, float]:
        metrics: dict[str, float] = {
            "environment/steps": self.step * self._config.rows_per_step * self._config.environment.chunk,
            "schedule/lag": rollout.number - rollout.version,
            "buffer/rows": self.buffer.total_samples,
            "buffer/trajectories": len(self.buffer),
        }
        if self.demonstrations is not None:
            metrics["buffer/demonstration_rows"] = self.demonstrations.total_samples
        if rollout.returns:
            metrics["reward/mean"] = sum(rollout.returns) / len(rollout.returns)
            metrics["episode/length"] = sum(rollout.lengths) / len(rollout.lengths)
        return metrics

    def _publish(self) -> None:
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.sac.actor.state_dict().items()}
        self.published.append(Weights(self.step, state))

    # --- checkpoints -------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Save everything that resuming needs. Called between two steps."""
        progress = None if self.progress is None else [_plain(own) for own in self.progress]
        published = [{"version": own.version, "state": dict(own.state)} for own in self.published]
        state = {"sac": self.sac.state_dict(), "published": published, "progress": progress}
        with (folder / STATE).open("wb") as stream:  # torch's own stream does not report a full disk
            torch.save(state, stream)
        for name, buffer in self._buffers().items():
            buffer.save_checkpoint(folder / BUFFERS / name)

    def load(self, folder: Path, step: int) -> None:
        """Continue from `save`, ``step`` steps into the run. Raises `UserError` where a part is missing or damaged."""
        state = read_state(folder)
        self.sac.load_state_dict(state["sac"])
        self.published.clear()
        self.published.extend(Weights(own["version"], own["state"]) for own in state["published"])
        self.progress = None if state["progress"] is None else [_progress(own) for own in state["progress"]]
        for name, buffer in self._buffers().items():
            buffer.load_checkpoint(folder / BUFFERS / name)
        self.step = step

    def _buffers(self) -> dict[str, TrajectoryReplayBuffer]:
        found = {"online": self.buffer}
        return found if self.demonstrations is None else {**found, "demonstrations": self.demonstrations}


def read_state(folder: Path) -> dict[str, Any]:
    """Read the learner's part of a checkpoint. Raises `UserError` where it is missing or damaged."""
    path = folder / STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {folder} is no checkpoint of an embodied run") from None
    except Exception as error:  # the unpickler may raise anything
        raise UserError(f"{path}: damaged; resume from an older checkpoint") from error


def _plain(own: Progress) -> Mapping[str, Any]:
    return {"episode": own.episode, "actions": torch.from_numpy(own.actions), "obs": torch.from_numpy(own.obs)}


def _progress(saved: Mapping[str, Any]) -> Progress:
    return Progress(saved["episode"], saved["actions"].numpy(), saved["obs"].numpy())
