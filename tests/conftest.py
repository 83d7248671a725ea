"""Settings of every test: no network, no other cache than its own, threads that do not fight for two cores."""

from __future__ import annotations

import os
import signal
import tempfile

# before torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="gleanrl-test-cache-")
os.environ["GLEANRL_CACHE"] = _cache.name

# a shell starts background jobs with SIGINT ignored, which children inherit: then no Ctrl-C could be tested
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
