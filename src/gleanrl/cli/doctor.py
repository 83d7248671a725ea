"""`gleanrl doctor`: checks whether this machine can train, and reports what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from gleanrl.cli.common import guarded

EXTRAS = {
    "alfworld": ("alfworld", "textworld", "fast_downward"),
    "textworld": ("textworld", "jericho"),
    "reasoning-gym": ("reasoning_gym",),
    "textarena": ("textarena",),
    "verifiers": ("verifiers",),
    "openenv": ("aiohttp",),
    "gymnasium": ("gymnasium",),
    "parquet": ("pyarrow",),
    "lerobot": ("pyarrow", "PIL", "av"),
    "datasets": ("datasets",),
    "math": ("math_verify",),
    "serve": ("fastapi", "uvicorn", "httptools"),
    "rewards": ("aiohttp",),
    "buffer": ("isal",),
    "embodied": ("gymnasium",),
    "ray": ("ray",),
    "lora": ("peft",),
    "vllm": ("vllm",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}
CORE = ("numpy", "pydantic", "rich", "torch", "transformers", "tokenizers", "safetensors", "zstandard")
FREE_GB = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=guarded(_doctor))


def _doctor(args: argparse.Namespace) -> int:
    """Print a line for each check. Return the exit status: 0 if training can run here, 1 if there is a problem."""
    from gleanrl.environments.tools.executor import bubblewrap_missing

    problems: list[str] = []
    print(f"python        {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in CORE:
        version = _version(name)
        print(f"{name:<13} {version or 'missing'}")
        if version is None:
            problems.append(f"{name} is missing: pip install gleanrl")
    print(f"cores         {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}")
    try:
        memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (ValueError, OSError, AttributeError):
        memory_gb = float("nan")
    print(f"memory        {memory_gb:.1f} GB")
    if _version("torch"):
        import torch

        if torch.cuda.is_available():
            kind = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
            found = f"{kind}, bfloat16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        else:
            found = f"none; CPU with {torch.get_num_threads()} threads"
        print(f"accelerator   {found}")
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    print(f"free disk     {free:.1f} GB here")
    if free < FREE_GB:
        problems.append(f"less than {FREE_GB:.0f} GB of disk is free; checkpoints may not fit")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        print(f"extra {extra:<14} {'ready' if not missing else f'not installed: pip install gleanrl[{extra}]'}")
    print(f"python tool   {bubblewrap_missing() or 'isolated by bubblewrap'}")
    data = os.environ.get("ALFWORLD_DATA")
    if data and not Path(data).is_dir():
        problems.append(f"ALFWORLD_DATA = {data} is not a folder")
    for problem in problems:
        print(f"problem: {problem}")
    print("ready to train" if not problems else "not ready")
    return 1 if problems else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
