"""The trajectory replay buffer. Works alone: it needs nothing else of the package."""

from gleanrl.buffer.mixed import MixedReplayBuffer
from gleanrl.buffer.replay_buffer import TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch
from gleanrl.buffer.trajectory import TensorTrajectory
from gleanrl.buffer.windows import Only

__all__ = ["Batch", "MixedReplayBuffer", "Only", "TensorTrajectory", "TrajectoryReplayBuffer"]
