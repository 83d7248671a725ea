"""The learning side of an embodied run: stores trajectories in a buffer and trains SAC on samples of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
    """Stores trajectories in its buffer, trains SAC on samples of the buffer, and publishes the policy's weights.

    Args:
        sac: the networks and optimizers.
        buffer: contains the trajectories of the policy.
        demonstrations: buffer of demonstrations, which fill a fixed share of each batch; None = no demonstrations.
        config: the configuration of the run.
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
        # numbers of chunk steps in a batch that come from the policy and from the demonstrations
        self._own, self._shown = MixedReplayBuffer.divide(config.learner.batch, share)
        self.step = 0  # number of steps done, i.e. of calls of `learn`
        self.environment_steps = 0  # number of environment steps that were executed for them
        self.progress: Sequence[Progress] | None = None  # states of the environments after the last trajectory
        self.published: deque[Weights] = deque(maxlen=config.schedule.lag + 1)
        self._publish()

    def check(self) -> None:
        """Raise `UserError` if the demonstrations lack a field, have other shapes than the run, or are too few."""
        if self.demonstrations is None or not self._shown:
            return
        if (there := self.demonstrations.window_samples) < self._shown:
            newest, batch = self._config.demonstrations.newest, self._config.learner.batch
            chosen = f"the newest {newest} trajectories" if newest else "the demonstrations"
            raise UserError(
                f"{chosen} hold {there} chunk steps, and a batch takes {self._shown}: show more, or lower "
                f"demonstrations.share = {self._config.demonstrations.share:g} or learner.batch = {batch}"
            )
        # One chunk step shows the shapes of all. The random state is restored, so that training does not depend on it.
        state = self.demonstrations.generator.get_state()
        try:
            batch = self.demonstrations.sample(1, fields=FIELDS)
        except UserError as error:
            raise UserError(f"the demonstrations cannot be used: {error}") from None
        self.demonstrations.generator.set_state(state)
        obs = self.sac.actor.body.weights[0].shape[1]
        sizes = {"curr_obs.states": obs, "next_obs.states": obs, "actions": self.sac.actor.actions}
        for name in FIELDS:
            value: Any = batch
            for key in name.split("."):
                value = value[key]
            size = sizes.get(name, self._config.environment.chunk)
            if value.shape[1:] != (size,):
                shape = list(value.shape[1:])
                raise UserError(f"the demonstrations' {name} have the shape {shape} in each chunk step, not [{size}]")

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Make one step: store a trajectory, make the updates that are due, and publish the policy. Returns the step's
        metrics.

        No updates are due during warm-up, or before the buffer has as many chunk steps as a batch takes from it.
        """
        config, settings = self._config, self._config.learner
        self.buffer.add_trajectories([rollout.trajectory])
        due, learned = 0, self.step - config.schedule.warmup
        if learned >= 0 and self.buffer.window_samples >= self._own:
            per_step = config.rows_per_step * settings.update_ratio
            due = int((learned + 1) * per_step) - int(learned * per_step)
        totals: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(derive(config.run.seed, "update", self.step))
        for _ in range(due):
            # each part is converted before they are joined, because demonstrations may have other dtypes
            parts = []
            for buffer, count in ((self.buffer, self._own), (self.demonstrations, self._shown)):
                if buffer is not None and count:
                    batch = buffer.sample(count, fields=FIELDS)
                    parts.append(Transitions.of(batch, settings.gamma, self.sac.device))
            losses = self.sac.update(Transitions.joined(parts), generator)
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value
        self.step += 1
        self.progress = rollout.progress
        dones = rollout.trajectory.dones
        assert dones is not None
        # The rest of a chunk in which an episode ends is not executed.
        self.environment_steps += int((dones.cumsum(-1) == dones).sum())
        self._publish()

        metrics = {name: float(value) / due for name, value in totals.items()}
        metrics["updates/done"] = due
        metrics["environment/steps"] = self.environment_steps
        metrics["schedule/lag"] = rollout.number - rollout.version
        metrics["buffer/rows"] = self.buffer.total_samples
        metrics["buffer/trajectories"] = len(self.buffer)
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
        """Save all that `load` needs into ``folder``. Must not be called while `learn` is running."""
        progress = None
        if self.progress is not None:
            progress = []
            for own in self.progress:
                actions, obs = torch.from_numpy(own.actions), torch.from_numpy(own.obs)
                progress.append({"episode": own.episode, "actions": actions, "obs": obs})
        published = [{"version": own.version, "state": dict(own.state)} for own in self.published]
        state = {"sac": self.sac.state_dict(), "published": published, "progress": progress}
        state["environment_steps"] = self.environment_steps
        # When torch opens the file itself, it does not raise an error if the disk is full.
        with (folder / STATE).open("wb") as stream:
            torch.save(state, stream)
        for name, buffer in self._buffers().items():
            buffer.save_checkpoint(folder / BUFFERS / name)

    def load(self, folder: Path, step: int) -> None:
        """Load what `save` has written to ``folder`` after ``step`` steps. Raises `UserError` if a part is missing or
        damaged.
        """
        state = read_state(folder)
        self.sac.load_state_dict(state["sac"])
        self.published.clear()
        self.published.extend(Weights(own["version"], own["state"]) for own in state["published"])
        self.progress = None
        if state["progress"] is not None:
            self.progress = [
                Progress(own["episode"], own["actions"].numpy(), own["obs"].numpy()) for own in state["progress"]
            ]
        for name, buffer in self._buffers().items():
            buffer.load_checkpoint(folder / BUFFERS / name)
        self.step, self.environment_steps = step, state["environment_steps"]

    def _buffers(self) -> dict[str, TrajectoryReplayBuffer]:
        found = {"online": self.buffer}
        return found if self.demonstrations is None else {**found, "demonstrations": self.demonstrations}


def read_state(folder: Path) -> dict[str, Any]:
    """Return what `ActorWorker.save` has written to ``folder``, except for the buffers.

    Raises `UserError` if the file is missing or damaged.
    """
    path = folder / STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {folder} is no checkpoint of an embodied run") from None
    except Exception as error:  # a damaged file may raise any error in torch's unpickler
        raise UserError(f"{path}: damaged; resume from an older checkpoint") from error
