"""Starts Ray or connects to a Ray cluster, reserves the resources of a run, and translates Ray's errors.

`open_cluster` is the entry point. It yields a `Cluster`, with whose options the actors of the run are started.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from gleanrl.config.settings import RaySettings
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress
from gleanrl.utils.text import first_line

CALLS = 10_000  # Ray's `max_concurrency` of each actor; high, because the services limit their concurrency themselves
_SOON_S = 5.0  # seconds to wait for resources before a message informs the user that the run waits

Resources = Mapping[str, float]


def import_ray(what: str = "this") -> Any:
    """Return the module ``ray``. If it is not installed, raise a `UserError` in which ``what`` needs Ray."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise UserError(f"{what} needs Ray: pip install 'gleanrl[ray]'") from None
    return ray


def death_or_cause(error: Exception) -> Exception | str:
    """Return the exception that the actor's code raised, or a text that states why the actor died.

    ``error`` is a ``RayError`` raised by a call of an actor. The text begins with "died: ".
    """
    errors = import_ray().exceptions
    if isinstance(error, errors.RayTaskError):
        raised = getattr(error, "cause", None)
        return raised if isinstance(raised, Exception) else RuntimeError(str(error))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = re.search(r"The actor is dead because (.+?)\.(?:\s|$)", " ".join(lines))
    return f"died: {said[1] if said else (lines or [type(error).__name__])[0].rstrip('.')}"


@dataclass
class Cluster:
    """The reserved resources of a run, and the driver's objects that all its actors use.

    Attributes:
        group: Ray's placement group, which reserves the resources.
        nodes: number of nodes of the cluster.
        device_lock: lock that colocated actors acquire before they use their common device.
        timeline: timeline in which the spans of the actors are recorded; None = spans are discarded.
    """

    settings: RaySettings
    console: Progress
    group: Any
    nodes: int
    places: Mapping[str, tuple[int, Resources]]  # kind of actor -> index of its first bundle, resources of one actor
    counts: Counter[str] = field(default_factory=Counter)  # metric -> number of events since the last call of `metrics`
    seconds: dict[str, float] = field(default_factory=dict)  # metric -> seconds spent since the last call of `metrics`
    device_lock: DeviceLock = field(default_factory=DeviceLock)
    timeline: Timeline | None = None

    def options(self, kind: str, index: int) -> dict[str, Any]:
        """Return the options with which Ray starts the actor ``index`` of a kind: resources, placement, concurrency."""
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            PlacementGroupSchedulingStrategy,
        )

        first, resources = self.places[kind]
        own = 0 if self.settings.placement == "colocated" and kind in _ON_DEVICE else index
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_concurrency": CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=first + own
            ),
        }

    def restart(self, death: str, deaths: int, action: str) -> None:
        """Count and report the death of an actor that is started again.

        Args:
            death: the actor's name and why it died.
            deaths: number of the actor's deaths, this one included.
            action: what is done about it, for the report.

        Raises:
            UserError: the actor may not be started again, because it died more than ``ray.max_restarts`` times.
        """
        restarts = self.settings.max_restarts
        if deaths > restarts:
            before = f"it was started again {restarts} times before" if restarts else "it is not replaced"
            raise UserError(f"{death}; {before} (ray.max_restarts)")
        self.counts["actors_restarted"] += 1
        self.console.print(f"{death}; {action} ({deaths} of {restarts})")

    def metrics(self) -> dict[str, float]:
        """Return counts of restarted actors and lost episodes, and durations, all since the last call."""
        metrics = {f"service/{name}": float(self.counts[name]) for name in ("actors_restarted", "episodes_lost")}
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.counts.clear()
        self.seconds.clear()
        return metrics


_ON_DEVICE = ("learner", "sampler")


@contextmanager
def open_cluster(settings: RaySettings, console: Progress, kinds: Mapping[str, int]) -> Iterator[Cluster]:
    """Reserve the resources of a run while the block runs, and yield the `Cluster`.

    If this process is already connected to Ray, that connection is used and kept. Otherwise Ray is started, or the
    cluster at ``ray.address`` is joined, and the connection ends with the block.

    Args:
        kinds: number of actors of each kind; of the kind "learner", there is one for each rank.

    Raises:
        UserError: Ray is not installed, there is no cluster at ``ray.address``, or the cluster does not provide the
            resources within ``ray.wait_s`` seconds.
    """
    ray = import_ray("the Ray runtime")
    _, bundles = place_actors(settings, kinds, gpus=False)
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    with nullcontext() if ray.is_initialized() else _connect(ray, settings, cpus):
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        places, bundles = place_actors(settings, kinds, gpus=gpus)
        strategy = "PACK" if settings.placement == "colocated" else settings.strategy
        group = ray.util.placement_group(bundles, strategy=strategy)
        try:
            ready = group.ready()
            if not ray.wait([ready], timeout=min(_SOON_S, settings.wait_s))[0]:
                wanted: Counter[str] = Counter()
                for bundle in bundles:
                    wanted.update(bundle)  # type: ignore[arg-type]
                there, needs = ray.cluster_resources(), []
                for name, amount in wanted.items():
                    needs.append(f"{amount:g} {name}, the cluster has {there.get(name, 0):g}")
                needed = "; ".join(needs)
                console.print(f"waiting for resources of the Ray cluster: the run needs {needed}")
                if not ray.wait([ready], timeout=max(0.0, settings.wait_s - _SOON_S))[0]:
                    raise UserError(
                        "the Ray cluster did not give what the run needs within ray.wait_s = "
                        f"{settings.wait_s:g} s: {needed}"
                    )
            yield Cluster(settings, console, group, sum(node["Alive"] for node in ray.nodes()), places)
        finally:
            with suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)


@contextmanager
def _connect(ray: Any, settings: RaySettings, cpus: float) -> Iterator[None]:
    """Start Ray on this machine, or join the cluster at ``settings.address``. Disconnect when the block ends.

    ``cpus`` is the number of CPUs that the run reserves.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics, unless the user has enabled them
    # Ray prints many lines about each worker's death. They are suppressed, because the run reports it in one line.
    logging.getLogger("ray").setLevel(logging.ERROR)
    # The module is private, so another version of Ray may lack the function that is replaced below.
    worker = importlib.import_module("ray._private.worker")
    quiet = {"log_to_driver": False, "configure_logging": False}
    printing = getattr(worker, "print_to_stdstream", None)
    try:
        worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[attr-defined]
        if settings.address is None:
            # Ray uses the number of CPUs only to limit how many actors it starts. The run declares as many as it needs,
            # so that its actors also start on a machine with fewer cores, which they then share.
            try:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + 1),
                    include_dashboard=False,
                    **quiet,
                )
            except Exception as error:  # Ray raises a bare Exception if a process of its own starts too slowly
                raise UserError(f"Ray did not start on this machine: {first_line(error).rstrip('.')}") from error
        elif settings.address.startswith("ray://"):
            raise UserError(
                f"ray.address = {settings.address!r}: start the run on a node of the cluster and give HOST:PORT"
            )
        else:
            try:
                ray.init(address=settings.address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                why = first_line(error).rstrip(".")
                raise UserError(f"ray.address = {settings.address!r}: no cluster to join ({why})") from None
        yield
    finally:
        ray.shutdown()
        worker.print_to_stdstream = printing  # type: ignore[attr-defined]


def place_actors(
    settings: RaySettings, kinds: Mapping[str, int], *, gpus: bool
) -> tuple[dict[str, tuple[int, Resources]], list[dict[str, float]]]:
    """Distribute the actors over the bundles of a placement group.

    With ``placement = "colocated"``, learner and samplers share the first bundle. Every other actor has a bundle of its
    own.

    Returns:
        `Cluster.places`, and the resources of each bundle.

    Raises:
        UserError: several ranks of the learner would share a GPU.
    """
    colocated = settings.placement == "colocated"
    sharing = sum(kinds.get(kind, 0) for kind in _ON_DEVICE)
    default = 0.0
    if gpus:
        default = math.floor(1e4 / sharing) / 1e4 if colocated and sharing else 1.0
    places: dict[str, tuple[int, Resources]] = {}
    bundles: list[dict[str, float]] = []
    shared: dict[str, float] = {}
    if colocated:
        bundles.append(shared)
    for kind, count in kinds.items():
        own = {"CPU": float(getattr(settings, f"{kind}_cpus"))}
        together = colocated and kind in _ON_DEVICE
        if kind in _ON_DEVICE:
            asked = getattr(settings, f"{kind}_gpus")
            own["GPU"] = default if asked is None else asked
            if kind == "learner" and count > 1 and 0 < own["GPU"] < 1:
                why = "colocated actors share one; set ray.placement = 'disaggregated'"
                if asked is not None:
                    why = f"ray.learner_gpus is {asked:g}"
                raise UserError(f"learner.ranks = {count}: each rank needs a GPU of its own, and {why}")
        places[kind] = (0 if together else len(bundles), own)
        if together:
            for name, amount in own.items():
                shared[name] = shared.get(name, 0.0) + amount * count
        else:
            bundles += [dict(own) for _ in range(count)]
    for bundle in bundles:
        for name in [name for name, amount in bundle.items() if not amount]:
            del bundle[name]
        if not bundle:  # Ray rejects empty bundles, so request a negligible share of a CPU
            bundle["CPU"] = 0.001
    return places, bundles
