"""A server that waits for little and lets few in: what its bounds do, without their usual time and numbers."""

from __future__ import annotations

import os

from gleanrl.environments.service import gate, protocol, server
from tests.environments.service.world import Echo

if "HASTY" in os.environ:  # in the process that serves, which imports this before it listens
    seconds, connections = os.environ["HASTY"].split()
    protocol.HEAD_S = gate.READ_S = float(seconds)
    server.CONNECTIONS = int(connections)


class Hasty(Echo):
    pass
