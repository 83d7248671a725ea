"""Starts or joins Ray, reserves the resources of a run, and translates Ray's errors."""

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

CALLS = 10_000  # number of calls that an actor accepts at once; its service limits how many run at the same time
_SOON_S = 5.0  # seconds of waiting for resources after which the user is informed

Resources = Mapping[str, float]


def import_ray(what: str = "this") -> Any:
    """Return the module ``ray``. Raises `UserError` if it is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise UserError(f"{what} needs Ray: pip install 'gleanrl[ray]'") from None
    return ray


def death_or_cause(error: Exception) -> Exception | str:
    """Return the exception that an actor's own code raised; or, if the actor is gone, a text that says why.

    The text begins with "died: ".
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
    """The resources that a run holds, the objects that its actors share with the driver, and metrics of the actors.

    Attributes:
        device_lock: the driver holds it for actors that share a device.
        timeline: receives the actors' spans. If it is None, spans are dropped.
    """

    settings: RaySettings
    console: Progress
    group: Any  # Ray's placement group
    nodes: int
    places: Mapping[str, tuple[int, Resources]]  # kind of actor -> index of its first bundle, resources of each actor
    counts: Counter[str] = field(default_factory=Counter)  # number of events by name, since the last call of `metrics`
    seconds: dict[str, float] = field(default_factory=dict)  # durations by metric, since the last call of `metrics`
    device_lock: DeviceLock = field(default_factory=DeviceLock)
    timeline: Timeline | None = None

    def options(self, kind: str, index: int) -> dict[str, Any]:
        """Return Ray's options for the actor ``index`` of a kind."""
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

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        metrics = {f"service/{name}": float(self.counts[name]) for name in ("actors_restarted", "episodes_lost")}
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.counts.clear()
        self.seconds.clear()
        return metrics


_ON_DEVICE = ("learner", "sampler")


@contextmanager
def open_cluster(
    settings: RaySettings, console: Progress, kinds: Mapping[str, int], *, ranks: int = 1
) -> Iterator[Cluster]:
    """Reserve the resources for ``kinds`` (number of actors of each kind) while the block runs, and yield the cluster.

    ``ranks`` is the number of the learner's processes, each of which takes a GPU if the cluster has any. If this
    process has already started or joined Ray, that Ray is used and not shut down.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or the cluster cannot give the resources.
    """
    ray = import_ray("the Ray runtime")
    _, bundles = place_actors(settings, kinds, gpus=False, ranks=ranks)
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    with nullcontext() if ray.is_initialized() else _connect(ray, settings, cpus):
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        places, bundles = place_actors(settings, kinds, gpus=gpus, ranks=ranks)
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
    """Start a local Ray, or join the cluster at ``settings.address``; disconnect when the block ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send usage statistics only if the user asks for it
    # Ray prints many lines about each worker's death. They are suppressed, because the run reports it in one line.
    logging.getLogger("ray").setLevel(logging.ERROR)
    worker = importlib.import_module("ray._private.worker")  # private, so another version of Ray may lack its function
    quiet = {"log_to_driver": False, "configure_logging": False}
    printing = getattr(worker, "print_to_stdstream", None)
    try:
        worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[attr-defined]
        if settings.address is None:
            # Ray's CPUs only limit the number of actors. A machine with fewer cores can run them all, sharing its cores
            ray.init(num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + 1), include_dashboard=False, **quiet)
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
    settings: RaySettings, kinds: Mapping[str, int], *, gpus: bool, ranks: int = 1
) -> tuple[dict[str, tuple[int, Resources]], list[dict[str, float]]]:
    """Return `Cluster.places` and the resources of each bundle. Raises `UserError` if the learner gets too few GPUs."""
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
        cpus = getattr(settings, f"{kind}_cpus")
        own = {"CPU": float(ranks if cpus is None else cpus)}  # only `learner_cpus` may be None
        together = colocated and kind in _ON_DEVICE
        if kind in _ON_DEVICE:
            asked = getattr(settings, f"{kind}_gpus")
            own["GPU"] = default * (ranks if kind == "learner" else 1) if asked is None else asked
            if kind == "learner" and ranks > 1 and 0 < own["GPU"] < ranks:
                why = "colocated actors share one; set ray.placement = 'disaggregated'"
                if asked is not None:
                    why = f"ray.learner_gpus is {asked:g}"
                raise UserError(f"learner.ranks = {ranks}: each rank needs a GPU of its own, and {why}")
        places[kind] = (0 if together else len(bundles), own)
        if together:
            for name, amount in own.items():
                shared[name] = shared.get(name, 0.0) + amount * count
        else:
            bundles += [dict(own) for _ in range(count)]
    for bundle in bundles:
        for name in [name for name, amount in bundle.items() if not amount]:
            del bundle[name]
        if not bundle:  # Ray accepts no empty bundle
            bundle["CPU"] = 0.001
    return places, bundles
