"""Settings of every test: no network, no other cache than its own, threads that do not fight for two cores."""

from __future__ import annotations

import os
import tempfile

# before torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="gleanrl-test-cache-")
os.environ["GLEANRL_CACHE"] = _cache.name
