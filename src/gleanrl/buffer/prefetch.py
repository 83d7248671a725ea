"""Batches made ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer.sampling import Batch


def prefetched(
    make: Callable[[], Batch], count: int | None, ahead: int, pin_memory: bool, device: torch.device | str | None
) -> Iterator[Batch]:
    """``count`` batches (None = without end), up to ``ahead`` of them ready before they are asked for.

    What ``make`` raises is raised here, after the batches that were made before.
    """
    ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
    places, stop = threading.Semaphore(max(1, ahead)), threading.Event()

    def fill() -> None:
        made = 0
        try:
            while count is None or made < count:
                places.acquire()
                if stop.is_set():
                    return
                batch = make()
                ready.put(_mapped(batch, Tensor.pin_memory) if pin_memory else batch)
                made += 1
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fill, name="buffer-prefetch", daemon=True)
    thread.start()
    try:
        while (batch := ready.get()) is not None:
            places.release()
            if isinstance(batch, BaseException):
                raise batch
            yield batch if device is None else _mapped(batch, lambda t: t.to(device, non_blocking=pin_memory))
    finally:
        stop.set()
        places.release()
        thread.join()


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, dict):
        return {name: _mapped(value, change) for name, value in batch.items()}
    return change(batch) if isinstance(batch, Tensor) else batch
