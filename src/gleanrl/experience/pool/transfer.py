"""Copies trajectories into a pool from another pool or a run's rollouts, and to parquet files and back.

`gleanrl pool seed`, `export` and `import` use this module, and so does a run with ``replay.seed_from``. Token ids and
log-probs are copied bit for bit.

A parquet file has one row per trajectory. The columns ``tokens``, ``mask`` and ``logprobs`` hold arrays over all tokens
of the trajectory, as a trainer needs them. Other columns hold the number of tokens of each turn and the number of turns
of each segment. The log-probs of tokens that were not sampled are null, because 0 would mean probability 1.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.experience.pool import admission, browse, bucket_index, codec
from gleanrl.experience.pool.browse import Entry
from gleanrl.experience.pool.pool import ExperiencePool, Incoming
from gleanrl.types import Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils import atomic, serialize
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

FORMAT = b"3"
ROWS = 256  # number of rows in a row group of a written file, and number of rows read at a time
BATCH = 1_000  # largest number of trajectories stored in one transaction
BATCH_TOKENS = 4_000_000  # a smaller batch is stored once it has this many tokens, to limit the memory that it takes
_NAMED = 5  # number of invalid rows that are logged one by one; further ones are only counted
_NUMBER, _TOKENIZER = b"gleanrl.pool", b"gleanrl.tokenizer"


@dataclass
class Moved:
    """How many trajectories an import or a seeding has stored in the pool, and how many it has left out."""

    stored: int = 0  # successes
    failures: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> number of trajectories left out for it


class Intake:
    """Stores trajectories in a pool, up to `BATCH` in one transaction. ``moved`` counts those stored and left out.

    A trajectory keeps its source, unless that is ``own`` or ``earlier``, which only the runs of this pool's file are:
    then it is ``default``. If ``label`` is given, it is the source of all.

    Used as ``with Intake(pool, "seed") as intake``. The exit of the block stores the last batch, even if the block
    raises. If the process is killed, the last batch is lost, and the earlier ones are in the pool.

    With ``failures``, trajectories with a valid score below the pool's ``success_threshold`` are stored as failures.

    Raises:
        UserError: ``failures`` is true, but the pool keeps none.
    """

    def __init__(self, pool: ExperiencePool, default: str, label: str | None = None, *, failures: bool = False) -> None:
        if failures and not pool.settings.keep_failures:
            raise UserError("replay.keep_failures = 0 keeps no failures; set it to the number to keep for each task")
        self.moved, self._failures = Moved(), failures
        self._pool, self._default, self._label = pool, default, label
        self._waiting: list[Incoming] = []
        self._tokens = 0  # number of tokens in the waiting trajectories

    def take(self, incoming: Incoming) -> None:
        """Accept one trajectory for storing. Without ``failures``, one that is no success is counted and left out."""
        trajectory = incoming.trajectory
        succeeded = trajectory.score.reaches(self._pool.settings.success_threshold)
        if not (succeeded or (self._failures and trajectory.score.valid)):
            self.moved.left_out["no success"] += 1
            return
        # The failures of a task must be stored in one transaction, because `add_failures` gets the newest first.
        same_task = bool(self._waiting) and self._waiting[-1].task.id == incoming.task.id
        if not same_task and (len(self._waiting) >= BATCH or self._tokens >= BATCH_TOKENS):
            self._store()
        kept = self._default if incoming.source in (admission.OWN, admission.EARLIER) else incoming.source
        self._waiting.append(replace(incoming, source=self._label or kept))
        self._tokens += trajectory.total_tokens

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *_: object) -> None:
        self._store()

    def _store(self) -> None:
        # Empty the batch first: if storing it fails, the exit of the ``with`` block must not try it again.
        batch, self._waiting, self._tokens = self._waiting, [], 0
        threshold = self._pool.settings.success_threshold
        failures = [incoming for incoming in batch if not incoming.trajectory.score.reaches(threshold)]
        successes = [incoming for incoming in batch if incoming.trajectory.score.reaches(threshold)]
        stored = sum(self._pool.add_all(successes)) if successes else 0
        kept = sum(self._pool.add_failures(failures)) if failures else 0
        self.moved.stored += stored
        self.moved.failures += kept
        if stored + kept < len(batch):
            self.moved.left_out["there already, no room, or not fit to train on"] += len(batch) - stored - kept


def check_tokenizers(pool: Path, source: str | None, of: object, *, trust: bool) -> str | None:
    """Check that trajectories from another source have the same tokenizer as the pool into which they are copied.

    A pool without a fingerprint and without trajectories accepts any tokenizer.

    Args:
        pool: path of the pool's file, which need not exist.
        source: fingerprint of the tokenizer of the other source; None = not known.
        of: name of the other source for error messages, such as its path.
        trust: if only one of the two fingerprints is known, assume that the tokenizers are the same.

    Returns:
        The fingerprint of the pool; None if it has none.

    Raises:
        UserError: the tokenizers differ, or one of them is not known and ``trust`` is false.
    """
    own, empty = None, True
    if pool.is_file():
        with browse.reading(pool) as db:
            own = browse.tokenizer(db)
            empty = not any(next(browse.lines(db, limit=1, failures=kind), None) for kind in (False, True))
    if (own is not None and own == source) or (own is None and empty):
        return own
    if own is not None and source is not None:
        raise UserError(f"{of} holds tokens of another tokenizer ({source}) than the pool ({own}); nothing was taken")
    if not trust:
        side = "the pool does not say which tokenizer its" if own is None else f"{of} does not say which tokenizer its"
        raise UserError(
            f"{side} token ids are of; if it is the same one, add --trust-tokenizer (of a run: "
            "replay.trust_tokenizer = true)"
        )
    return own


# --- from another pool or run -------------------------------------------------------------------
def seed_from_pool(
    pool: ExperiencePool,
    source: Path,
    *,
    step: int = 0,
    trust: bool = False,
    label: str | None = None,
    failures: bool = False,
    done: Callable[[], object] = lambda: None,
) -> Moved:
    """Copy every success of the pool at ``source`` into ``pool``, with the latest solve rate of its task there.

    Args:
        pool: the pool that receives the trajectories.
        source: path of the pool to copy from.
        step: step of this run from which the age of the trajectories counts.
        trust: if only one of the pools has the fingerprint of its tokenizer, assume that both have the same tokenizer.
        label: source that is recorded for them; None = as `Intake` says, with ``seed`` for those of runs.
        failures: copy its failures too.
        done: called after each trajectory of ``source``.

    Raises:
        UserError: there is no pool at ``source``, its tokens are (or may be) from another tokenizer, or ``failures`` is
            true and ``pool`` keeps none.
    """
    with browse.reading(source) as db, Intake(pool, "seed", label, failures=failures) as intake:
        check_tokenizers(pool.path, browse.tokenizer(db), source, trust=trust)
        for found in chain(browse.entries(db), browse.entries(db, failures=True) if failures else ()):
            if isinstance(found, Entry):
                line = found.line
                given = (found.task, found.stored.trajectory, step, line.temperature, step)
                intake.take(Incoming(*given, line.attempts, line.successes, line.source))
            else:
                intake.moved.left_out["damaged"] += 1
            done()
    return intake.moved


def seed_from_groups(
    pool: ExperiencePool,
    read: Callable[[], Iterable[Sequence[Trajectory]]],
    tasks: Mapping[str, Task],
    *,
    temperature: float,
    whole: bool,
    step: int = 0,
    label: str | None = None,
) -> Moved:
    """Store every success in groups of fresh trajectories, with the solve rate of the latest group of its task.

    Args:
        pool: the pool that receives the trajectories.
        read: returns the groups, oldest first. It is called twice: first to compute the solve rates, then to store.
        tasks: the tasks by id. A success on any other task is left out.
        temperature: sampling temperature of the trajectories.
        whole: whether each group contains all of its members. If not, solve rates cannot be computed, and the tasks are
            stored without attempts.
        step: step of this run from which the age of the trajectories counts.
        label: source that is recorded for them; None = ``seed``.
    """
    threshold = pool.settings.success_threshold
    rates: dict[str, tuple[int, int]] = {}
    for group in read() if whole else ():
        valid = [t for t in group if t.score.valid]
        if valid:
            rates[valid[0].task_id] = (sum(t.score.reaches(threshold) for t in valid), len(valid))
    with Intake(pool, "seed", label) as intake:
        for group in read():
            for trajectory in group:
                if not trajectory.score.reaches(threshold):
                    continue
                task = tasks.get(trajectory.task_id)
                if task is None:
                    intake.moved.left_out["its task is not one of its run's"] += 1
                    continue
                successes, attempts = rates.get(task.id, (0, 0))
                intake.take(Incoming(task, trajectory, step, temperature, step, attempts, successes, "seed"))
    return intake.moved


# --- to parquet ---------------------------------------------------------------------------------
def export_parquet(
    source: Path, target: Path, *, failures: bool = False, done: Callable[[], object] = lambda: None
) -> tuple[int, int, list[str]]:
    """Write every success of the pool at ``source`` to the parquet file ``target``, and with ``failures`` its failures.

    An existing parquet file is replaced. ``done`` is called after each trajectory. Returns how many successes and
    how many failures were written, and one line for each that could not be written because it is damaged or has a text
    that is no valid Unicode. The keys of failures are below 0.

    Raises:
        UserError: there is no pool at ``source``, ``target`` exists and is not a parquet file, the disk is full, or
            pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    if target.exists():
        start = b""
        if target.is_file():
            with target.open("rb") as file:
                start = file.read(4)
        if start != b"PAR1":
            raise UserError(f"{target} is there and is no parquet file; give another name")
    successes, failed, damaged, waiting = 0, 0, [], []
    with browse.reading(source) as db:
        marks = {_NUMBER: FORMAT}
        if (known := browse.tokenizer(db)) is not None:
            marks[_TOKENIZER] = known.encode()
        schema = _schema(arrow).with_metadata(marks)
        with atomic.file(target) as partial, parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for found in chain(browse.entries(db), browse.entries(db, failures=True) if failures else ()):
                done()
                if not isinstance(found, Entry):
                    damaged.append(f"trajectory {found[0]}: {found[1]}")
                    continue
                try:
                    waiting.append(_to_row(found))
                except (ValueError, TypeError) as error:
                    damaged.append(f"trajectory {found.line.key}: {error}")
                    continue
                successes += found.line.key > 0
                failed += found.line.key < 0
                if len(waiting) == ROWS:
                    writer.write_table(_table(arrow, waiting, schema))
                    waiting = []
            writer.write_table(_table(arrow, waiting, schema))
    return successes, failed, damaged


def _schema(arrow: Any) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    ints = arrow.list_(arrow.int32())
    return arrow.schema(
        [
            ("key", whole),
            ("task_id", text),
            ("task", text),  # JSON: prompt, payload and kind
            ("attempts", whole),
            ("successes", whole),
            ("trajectory_id", text),
            ("tokens", ints),
            ("mask", arrow.list_(arrow.bool_())),
            ("logprobs", arrow.list_(arrow.float32())),
            ("turn_tokens", ints),  # number of tokens in each turn
            ("turn_sampled", arrow.list_(arrow.bool_())),
            ("turn_version", arrow.list_(whole)),
            ("turn_reward", arrow.list_(real)),
            ("turn_state", arrow.list_(text)),
            ("segment_turns", ints),  # number of turns in each segment
            ("messages", text),  # JSON: one message per turn
            ("score", real),
            ("parts", arrow.map_(text, real)),
            ("explanation", text),
            ("stop", text),
            ("info", text),  # JSON
            ("entropy", real),
            ("version", whole),
            ("temperature", real),
            ("step", whole),
            ("uses", whole),
            ("source", text),
        ]
    )


def _to_row(entry: Entry) -> dict[str, Any]:
    """Convert an entry to a row. Raises `ValueError` or `TypeError` if parquet cannot hold it."""
    line, trajectory = entry.line, entry.stored.trajectory
    turns = list(trajectory.turns())
    names = [line.task, trajectory.id, trajectory.score.explanation, *trajectory.score.parts]
    for text in [*names, *(turn.state for turn in turns)]:
        (text or "").encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    mask = np.concatenate([np.full(turn.tokens.size, turn.sampled) for turn in turns])
    logprobs = np.concatenate(
        [np.zeros(turn.tokens.size, np.float32) if turn.logprobs is None else turn.logprobs for turn in turns]
    )
    return {
        "key": line.key,
        "task_id": line.task,
        "task": _json(
            {"prompt": list(entry.task.prompt), "payload": dict(entry.task.payload), "kind": entry.task.kind}
        ),
        "attempts": line.attempts,
        "successes": line.successes,
        "trajectory_id": trajectory.id,
        "tokens": np.concatenate([turn.tokens for turn in turns]),
        "mask": mask,
        "logprobs": (logprobs, ~mask),
        "turn_tokens": [turn.tokens.size for turn in turns],
        "turn_sampled": [turn.sampled for turn in turns],
        "turn_version": [turn.version for turn in turns],
        "turn_reward": [turn.reward for turn in turns],
        "turn_state": [turn.state for turn in turns],
        "segment_turns": [len(segment) for segment in trajectory.segments],
        "messages": _json([dict(turn.message) for turn in turns]),
        "score": trajectory.score.value,
        "parts": [(name, float(value)) for name, value in trajectory.score.parts.items()],
        "explanation": trajectory.score.explanation,
        "stop": trajectory.stop.value,
        "info": _json(dict(trajectory.info)),
        **{name: getattr(line, name) for name in ("entropy", "version", "temperature", "step", "uses", "source")},
    }


def _table(arrow: Any, rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    columns = []
    for column in schema:
        cells = [row[column.name] for row in rows]
        # Convert log-probs from numpy arrays, with a mask for the nulls. Python floats would be slow and take much
        # memory.
        if column.name == "logprobs":
            inner = [arrow.array(values, arrow.float32(), mask=absent) for values, absent in cells]
            offsets = np.cumsum([0, *map(len, inner)]).astype(np.int32)
            flat = arrow.concat_arrays(inner) if inner else arrow.array([], arrow.float32())
            columns.append(arrow.ListArray.from_arrays(arrow.array(offsets), flat))
        else:
            columns.append(arrow.array(cells, column.type))
    return arrow.Table.from_arrays(columns, schema=schema)


# --- from parquet -------------------------------------------------------------------------------
def import_parquet(
    pool: ExperiencePool,
    source: Path,
    *,
    label: str | None = None,
    failures: bool = False,
    done: Callable[[], object] = lambda: None,
) -> Moved:
    """Store the trajectory of every valid row of the parquet file ``source`` in the pool, in the order of the file.

    Failures are stored as `ExperiencePool.add_failures` says: they take free places only.

    Each trajectory keeps its version, temperature and step. Its count of uses starts at 0. Tasks that were retired in
    the exported pool are not retired in this one. An invalid row, for example one with arrays of different lengths or
    with a missing log-prob, is left out, and the first few of them are logged. If a task gets more trajectories than
    its capacity, ``select`` decides which remain. Their source is ``label`` or, if it is None, as `Intake` says, with
    ``import`` for those of runs. Rows whose score is no success by ``success_threshold`` are left out or, with
    ``failures``, stored as failures. ``done`` is called after each row.

    Raises:
        UserError: ``source`` was not written by `export_parquet`, it is damaged, pyarrow is not installed, or
            ``failures`` is true and the pool keeps none.
    """
    with Intake(pool, "import", label, failures=failures) as intake:
        for number, row in enumerate(_rows(source)):
            done()
            try:
                incoming = _from_row(row)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
                intake.moved.left_out["faulty"] += 1
                if intake.moved.left_out["faulty"] <= _NAMED:
                    log.warning("%s: row %d is left out: %s", source, number, " ".join(str(error).split()))
            else:
                intake.take(incoming)
    return intake.moved


def parquet_tokenizer(source: Path) -> str | None:
    """Return the fingerprint of the tokenizer that an exported file contains; None if the exported pool had none.

    Raises:
        UserError: the file was not written by `export_parquet`, or pyarrow is not installed.
    """
    found = _open_parquet(source).schema_arrow.metadata.get(_TOKENIZER)
    return None if found is None else found.decode("utf-8", "replace")


def _open_parquet(source: Path) -> Any:
    arrow, parquet = _pyarrow()
    if not source.is_file():
        raise UserError(f"there is no file {source}")
    try:
        file = parquet.ParquetFile(source)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{source} is not a whole parquet file ({str(error).splitlines()[0]})") from error
    found, needed = file.schema_arrow, _schema(arrow)
    if (found.metadata or {}).get(_NUMBER) != FORMAT:
        raise UserError(f"{source} was not written by `gleanrl pool RUN export` of this version")
    odd = [c.name for c in needed if found.get_field_index(c.name) < 0 or found.field(c.name).type != c.type]
    if odd:
        raise UserError(f"{source}: column {odd[0]!r} is missing or is not {needed.field(odd[0]).type}")
    return file


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield every row as a dictionary by column name.

    The values of ``tokens``, ``mask`` and ``logprobs`` are arrow arrays, so that log-probs remain float32.
    """
    arrow, _ = _pyarrow()
    try:
        for batch in _open_parquet(source).iter_batches(batch_size=ROWS):
            for index in range(batch.num_rows):
                cells = ((name, batch.column(name)[index]) for name in batch.schema.names)
                yield {
                    name: cell.values if name in ("tokens", "mask", "logprobs") else cell.as_py()
                    for name, cell in cells
                }
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{source} is damaged ({str(error).splitlines()[0]}); what came before it is stored") from error


def _from_row(row: Mapping[str, Any]) -> Incoming:
    """Convert a row to a trajectory and its task.

    Raises `ValueError` or another error if the row is invalid. `import_parquet` catches them and counts such rows.
    """
    sizes, sampled = row["turn_tokens"], row["turn_sampled"]
    versions, rewards, states = row["turn_version"], row["turn_reward"], row["turn_state"]
    messages, described, info = (json.loads(row[name]) for name in ("messages", "task", "info"))
    tokens = row["tokens"].to_numpy(zero_copy_only=False)
    mask = row["mask"].to_numpy(zero_copy_only=False)
    logprobs = row["logprobs"].to_numpy(zero_copy_only=False)
    present = row["logprobs"].is_valid().to_numpy(zero_copy_only=False)
    if min(sizes, default=0) < 0 or not sum(sizes) == tokens.size == mask.size == logprobs.size:
        counts = f"{tokens.size} tokens, {mask.size} in its mask, {logprobs.size} log-probs, {sum(sizes)} in its turns"
        raise ValueError(f"its lengths differ: {counts}")
    if (
        not len(sizes)
        == len(sampled)
        == len(versions)
        == len(rewards)
        == len(states)
        == len(messages)
        == sum(row["segment_turns"])
    ):
        raise ValueError("its turns are not counted alike")
    named = isinstance(row["trajectory_id"], str) and isinstance(row["task_id"], str)
    if not named or row["tokens"].null_count or None in versions or not all(isinstance(m, dict) for m in messages):
        raise ValueError("a name, token, version or message is missing")
    expected = np.repeat(np.array(sampled, bool), sizes)
    if not (np.array_equal(mask, expected) and np.array_equal(present, expected)):
        raise ValueError("its mask, its log-probs and its turns disagree on what was sampled")
    ends = np.cumsum(sizes)
    turns = [
        Turn(message, tokens[end - size : end], logprobs[end - size : end] if was_sampled else None, *said)
        for message, size, end, was_sampled, *said in zip(
            messages, sizes, ends, sampled, versions, rewards, states, strict=True
        )
    ]
    starts = np.cumsum([0, *row["segment_turns"]]).tolist()
    trajectory = Trajectory(
        id=row["trajectory_id"],
        task_id=row["task_id"],
        segments=tuple(tuple(turns[start:end]) for start, end in pairwise(starts)),
        score=Score(row["score"], True, dict(row["parts"]), row["explanation"]),
        stop=StopReason(row["stop"]),
        info=dict(info),
    )
    if cause := admission.find_defect(trajectory, admission.Limits()):
        raise ValueError(admission.DEFECTS[cause])
    prompt, payload = tuple(described["prompt"]), dict(described["payload"])
    task = Task(row["task_id"], prompt, payload, described.get("kind", ""))
    # The result is not used. If the pool cannot encode the trajectory, the error is raised here, where it concerns only
    # one row. Inside the pool's transaction it would undo the whole batch.
    codec.encode_trajectory(trajectory)
    step, version, attempts, successes = (int(row[name]) for name in ("step", "version", "attempts", "successes"))
    temperature = float(row["temperature"])
    if not (0 < temperature < math.inf and 0 <= successes <= attempts < bucket_index.ATTEMPTS):
        raise ValueError("temperature, attempts or successes make no sense")
    if not admission.SOURCE_NAME.fullmatch(row["source"]):
        raise ValueError("its source is no valid name")
    return Incoming(task, trajectory, step, temperature, version, attempts, successes, row["source"])


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError("parquet needs pyarrow: pip install 'gleanrl[parquet]'") from None


def _json(value: Any) -> str:
    return json.dumps(serialize.to_builtins(value), separators=(",", ":"))
