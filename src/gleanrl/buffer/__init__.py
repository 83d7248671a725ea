"""The trajectory replay buffer. Works alone: it needs nothing else of the package."""

from gleanrl.buffer.mixed import MixedReplayBuffer
from gleanrl.buffer.replay_buffer import TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch, Only
from gleanrl.buffer.trajectory import TensorTrajectory

__all__ = ["Batch", "MixedReplayBuffer", "Only", "TensorTrajectory", "TrajectoryReplayBuffer"]
