"""Batches made ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer.sampling import Batch
from gleanrl.buffer.stream import Ahead, Stream


def prefetched(
    make: Callable[[], Batch],
    stream: Stream,
    count: int | None,
    ahead: int,
    pin_memory: bool,
    device: torch.device | str | None,
) -> Iterator[Batch]:
    """``count`` batches (None = without end), up to ``ahead`` of them ready before they are asked for.

    ``stream`` is what ``make`` draws from.

    What ``make`` raises is raised here, after the batches that were made before.
    """
    ready: queue.SimpleQueue[tuple[Ahead, Batch] | BaseException | None] = queue.SimpleQueue()
    places, stop = threading.Semaphore(max(1, ahead)), threading.Event()
    waiting: list[Ahead] = []

    def fill() -> None:
        made = 0
        try:
            while count is None or made < count:
                places.acquire()
                if stop.is_set():
                    return
                waiting.append(own := stream.begin())
                batch = make()
                stream.drawn(own)
                ready.put((own, _mapped(batch, Tensor.pin_memory) if pin_memory else batch))
                made += 1
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fill, name="buffer-prefetch", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            places.release()
            if isinstance(found, BaseException):
                raise found
            own, batch = found
            waiting.remove(own)
            stream.end(own)
            yield batch if device is None else _mapped(batch, lambda t: t.to(device, non_blocking=pin_memory))
    finally:
        stop.set()
        places.release()
        thread.join()
        for own in waiting:
            stream.end(own)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, dict):
        return {name: _mapped(value, change) for name, value in batch.items()}
    return change(batch) if isinstance(batch, Tensor) else batch
