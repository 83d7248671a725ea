"""The trajectory replay buffer. It depends on nothing but `gleanrl.utils`, so it can be used alone.

From the outside in: `replay_buffer` (what callers use), `sampling` with `priorities`, `checkpoint` and `transfer`;
`reader` and `writer` (a folder of trajectories) or `rlinf` (RLinf's directories); and `table`, `columns`, `log` and
`files` (the layout of rows, and the files).
"""

from gleanrl.buffer.replay_buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch, Only
from gleanrl.buffer.trajectory import TensorTrajectory

__all__ = ["Batch", "MixedReplayBuffer", "Only", "TensorTrajectory", "TrajectoryReplayBuffer"]
