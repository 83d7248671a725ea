"""Runs a learner of two ranks that fails as CASE says: `python -m tests.runtime.sharded_world CASE`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import gleanrl.runtime.sharded as sharded
from gleanrl.config.settings import Config, LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine
from gleanrl.utils.errors import UserError
from tests.builders import tiny_model
from tests.learners.test_sharded import batch_of


def main(case: str) -> int:
    """Run a case and end as ``gleanrl`` does, with an exit status and errors as one line."""
    torch.set_num_threads(1)
    config = Config.model_validate({"learner": {"ranks": 1 if "RANK" in os.environ else 2}, "model": {"device": "cpu"}})
    try:
        if case == "stillborn":
            sharded._start = stillborn
        with sharded.learner_ranks(config) as ranks:
            assert ranks is not None
            {"fails": fails, "interrupted": interrupted, "stillborn": work}[case](ranks)
    except UserError as error:
        print(f"gleanrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gleanrl: interrupted", file=sys.stderr)
        return 130
    return 0


def engine(ranks: Ranks) -> ShardedEngine:
    return ShardedEngine(ranks, tiny_model(), LearnerSettings(), LossSettings(), pad_token=0, temperature=1.0)


def work(ranks: Ranks) -> None:
    engine(ranks).backward(batch_of(0, LossSettings()).samples)


def fails(ranks: Ranks) -> None:
    """Rank 0 raises MemoryError in the middle of a forward pass, while rank 1 waits for it in a collective."""
    made = engine(ranks)
    made.local.backend.model.model.layers[1].register_forward_pre_hook(_raise)
    made.backward(batch_of(0, LossSettings()).samples)


def _raise(*_: Any) -> None:
    raise MemoryError("no memory is left")


def interrupted(ranks: Ranks) -> None:
    """Rank 0 is interrupted while it broadcasts the model."""
    broadcast, sent = dist.broadcast, list[torch.Tensor]()

    def some(tensor: torch.Tensor, src: int) -> None:
        sent.append(tensor)
        if len(sent) == 5:
            raise KeyboardInterrupt
        broadcast(tensor, src=src)

    dist.broadcast = some
    engine(ranks)


def stillborn(rank: int, count: int, port: int, threads: int, **_: Any) -> subprocess.Popen[bytes]:
    """Start a rank that exits with status 3 after it has registered, before the process group exists."""
    del threads
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    code = (
        "import os, sys; from gleanrl.learners.distributed.ranks import PrefixStore, environment; "
        "met = environment(os.environ);"
        "PrefixStore('start', met[0]).set(os.environ['RANK'], 'here'); sys.exit(3)"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**env, "MASTER_PORT": str(port)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
