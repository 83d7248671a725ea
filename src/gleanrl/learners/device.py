"""What a device tells about itself: peak memory, and how much of its arithmetic was used."""

from __future__ import annotations

import torch

_PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # dense FLOP/s


def peak_memory_gib(device: torch.device) -> float | None:
    """GiB held at most since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def model_flops_utilisation(device: torch.device, parameters: int, tokens: float, seconds: float) -> float | None:
    """6 FLOPs a parameter and token (forward and backward) over the device's peak; None where that is unknown."""
    if device.type != "cuda" or seconds <= 0:
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for key, flops in _PEAK_BFLOAT16.items() if key in name), None)
    return None if peak is None else 6 * parameters * tokens / seconds / peak
