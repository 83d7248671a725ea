"""The trajectory replay buffer. It depends only on `gleanrl.utils`, so it can be used without the rest of Glean RL.

The modules, from the interface to the files:

* `replay_buffer` has the classes that callers use. `sampling`, `priorities`, `background`, `checkpoint` and `transfer`
  implement their methods.
* `reader` and `writer` read and write a folder of trajectories, and `rlinf` reads and writes RLinf's directories.
* `table`, `columns`, `log` and `files` define the layout of rows and the files.
"""

from gleanrl.buffer.replay_buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch, Only
from gleanrl.buffer.trajectory import TensorTrajectory

__all__ = ["Batch", "MixedReplayBuffer", "Only", "TensorTrajectory", "TrajectoryReplayBuffer"]
