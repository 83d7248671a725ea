"""The trajectory replay buffer: it stores trajectories of tensors on disk and draws random batches from them.

The package depends only on `gleanrl.utils`, so it can be used without the rest of Glean RL. Its modules, from the
public interface down to the files:

* `replay_buffer` defines the classes that callers use. `sampling`, `priorities`, `background` and `checkpoint`
  implement their methods.
* `transfer` and `lerobot` implement the commands that merge, split and export buffers.
* `reader` and `writer` read and write the folder of a buffer. `rlinf` reads and writes the directories of RLinf.
* `trajectory` converts trajectories to rows. `table`, `columns`, `log` and `files` store the rows in files.
"""

from gleanrl.buffer.replay_buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch, Only
from gleanrl.buffer.trajectory import TensorTrajectory

__all__ = ["Batch", "MixedReplayBuffer", "Only", "TensorTrajectory", "TrajectoryReplayBuffer"]
