"""Writes TensorBoard event files to the folder ``events/`` of the run, without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo


class TensorboardMonitor:
    """Writes each metric as a TensorBoard scalar.

    A resumed run repeats the steps after the resumed step. So the monitor first writes an event that makes TensorBoard
    discard the earlier values of these steps.
    """

    def __init__(self, info: RunInfo) -> None:
        self._writer = EventFileWriter(str(info.folder.events_path))
        if info.resumed_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=info.resumed_step + 1, session_log=start))

    def log(self, step: int, metrics: Metrics) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for number, text in enumerate(texts.values()):
            # TensorBoard reads texts as Markdown, in which indented lines keep their spaces and line breaks.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            summary = Summary.FromString(text_pb(f"samples/{number}", shown).SerializeToString())
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
