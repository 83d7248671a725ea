"""`gleanrl pool RUN ...`: inspects, verifies and prunes an experience pool, exports it, and fills it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gleanrl.cli.common import (
    RUN_HELP,
    Command,
    guarded,
    natural,
    positive,
    safe,
    spread,
    table,
    terminal_progress,
)
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import format_bytes

if TYPE_CHECKING:
    from gleanrl.config.loading import Overrides
    from gleanrl.config.settings import ReplaySettings
    from gleanrl.experience import ExperiencePool
    from gleanrl.experience.pool.transfer import Moved
    from gleanrl.types import Turn

WIDTH = 100  # maximum number of characters in a line of token ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Actions that write to the pool (prune, import, seed) use the run's [replay] settings. Options --replay.key "
        "VALUE replace these, for example --replay.capacity_per_task 32. The actions fail while a run uses the pool; "
        "all other actions also work then."
    )
    parser.add_argument("run", metavar="RUN", help=f"{RUN_HELP}, or the .sqlite file of a pool")
    parser.set_defaults(command=guarded(_stats))
    actions = parser.add_subparsers(
        metavar="ACTION",
        description="what to do with the pool (default: print the numbers, difficulties and ages of its contents)",
    )

    def action(name: str, command: Command, text: str, *, writes: bool = False) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(command=guarded(command), takes_settings=writes)
        return made

    listed = action("list", _list, "list the trajectories, newest first")
    listed.add_argument("--failures", action="store_true", help="list the failures instead, whose keys are below 0")
    listed.add_argument("--task", metavar="ID", help="list only the trajectories of this task")
    listed.add_argument("--limit", type=natural, default=50, metavar="N", help="maximum number (default 50, 0 = all)")
    shown = action("show", _show, "print one trajectory, turn by turn, with token ids and log-probs")
    shown.add_argument("key", type=int, metavar="KEY", help="key of the trajectory, which `list` prints")
    action("verify", _verify, "check the file, its counts and all records; exit with status 1 if there is a fault")
    pruned = action("prune", _prune, "evict the trajectories that any of the options selects", writes=True)
    pruned.add_argument("--max-age", type=natural, metavar="N", help="trajectories sampled more than N versions ago")
    pruned.add_argument(
        "--keep", type=natural, metavar="N", help="of each task, all but the N that replay.select ranks first"
    )
    pruned.add_argument("--retired", action="store_true", help="the trajectories of retired tasks")
    pruned.add_argument("--source", metavar="NAME", help="the trajectories from this source")
    text = "of each task, all failures but the newest N (the options above except --keep select failures too)"
    pruned.add_argument("--keep-failures", type=natural, metavar="N", help=text)
    exported = action("export", _export, "write all successes to a parquet file, without loss")
    exported.add_argument("file", type=Path, metavar="FILE.parquet")
    exported.add_argument("--failures", action="store_true", help="write the failures too")
    imported = action("import", _import, "store the trajectories of an exported parquet file in the pool", writes=True)
    imported.add_argument("file", type=Path, metavar="FILE.parquet")
    text = "store successes of another run or demonstrations, as if they had been sampled at the pool's newest step"
    seeded = action("seed", _seed, text, writes=True)
    source = seeded.add_mutually_exclusive_group(required=True)
    source.add_argument("--rollouts", metavar="RUN", help="store the fresh successes in the rollout files of this run")
    source.add_argument("--pool", metavar="RUN", help="store the trajectories of this run's pool, or of a .sqlite file")
    text = "store N expert demonstrations of the run's training tasks; docs/howto/pool.md explains their log-probs"
    source.add_argument("--demonstrations", type=positive, metavar="N", help=text)
    for taking in (imported, seeded):
        text = "store failures too, where a task has fewer than replay.keep_failures (of seed: with --pool)"
        taking.add_argument("--failures", action="store_true", help=text)
        text = "source to record for the trajectories, for replay.source_limits (default: import, seed, demonstrations)"
        taking.add_argument("--source", type=source_name, metavar="NAME", help=text)
        taking.add_argument(
            "--trust-tokenizer",
            action="store_true",
            help="if the tokenizer of the pool or of the source is not known, assume that it is the other's",
        )


def source_name(text: str) -> str:
    """Return ``text`` if trajectories that are copied into a pool may have it as their source."""
    from gleanrl.experience.pool import admission

    if text in (admission.OWN, admission.EARLIER) or not admission.SOURCE_NAME.fullmatch(text):
        rule = "a letter, then up to 31 letters, digits, - or _; own and earlier are those of runs"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a source: {rule}")
    return text


# --- opening ------------------------------------------------------------------------------------
def find_pool(name: str) -> Path:
    """Return the path of a pool's file. The file may not exist.

    ``name`` is the path of a .sqlite file, the folder of a run, or the name of a run under runs/.

    Raises:
        UserError: ``name`` is not a .sqlite file and there is no run of this name.
    """
    from gleanrl.runtime.run_folder import RunFolder

    path = Path(name)
    if path.suffix == ".sqlite" and not path.is_dir():
        return path
    return RunFolder.existing(_run_path(name)).pool_path()


def _run_path(name: str) -> Path:
    from gleanrl.runtime.run_folder import find_run

    if Path(name).exists() and not Path(name).is_dir():
        raise UserError(f"{name} is neither a run folder nor a .sqlite file")
    return find_run(name)


def _settings(name: str, overrides: Overrides) -> ReplaySettings:
    """Return the settings of the pool: the run's [replay] section, in which ``overrides`` replace values.

    If ``name`` is a .sqlite file, or the run has no config.toml, the defaults take the place of the run's section.
    Raises `UserError` for an override outside of [replay].
    """
    from gleanrl.config.loading import load, load_defaults

    for key, _ in overrides:
        if not key.startswith("replay."):
            raise UserError(f"unknown option --{key}; settings of a pool are written --replay.key VALUE")
    config = _run_path(name) / "config.toml" if Path(name).suffix != ".sqlite" else None
    if config is None or not config.exists():
        return load_defaults(overrides).replay
    return load(str(config), overrides).replay


@contextmanager
def _opened(args: argparse.Namespace, *, tokenizer: str | None = None, make: bool = False) -> Iterator[ExperiencePool]:
    """Open the pool for writing while the block runs.

    ``tokenizer`` is the fingerprint that the pool must have or, if it has none yet, gets. With ``make``, a .sqlite file
    that does not exist is created.
    """
    from gleanrl.experience import ExperiencePool

    may_be_new = make and Path(args.run).suffix == ".sqlite"
    path = find_pool(args.run) if may_be_new else _existing(args)
    settings = _settings(args.run, args.overrides)
    if vars(args).get("trust_tokenizer"):
        settings = settings.model_copy(update={"trust_tokenizer": True})
    if vars(args).get("failures") and not settings.keep_failures and Path(args.run).suffix == ".sqlite":
        raise UserError(
            f"{args.run} is opened with the default settings, and replay.keep_failures = 0 keeps no failures; name the "
            "run's folder, whose settings then count, or add --replay.keep_failures N"
        )
    with ExperiencePool(path, settings, tokenizer=tokenizer) as pool:
        yield pool
        if pool.stats()["marks"]:
            print("a resumed run goes back to its checkpoint, which undoes this; a new one with replay.path keeps it")


def _existing(args: argparse.Namespace) -> Path:
    """Return the path of the pool's file. Raises `UserError` if there is no such file."""
    path = find_pool(args.run)
    if not path.is_file():
        from gleanrl.runtime.run_folder import RunFolder

        cause = ""
        if Path(args.run).suffix != ".sqlite":
            replay = RunFolder(_run_path(args.run)).read_config().get("replay", {})
            cause = "" if replay.get("enabled") else "; the run was made without replay.enabled = true"
        raise UserError(f"there is no experience pool at {path}{cause}")
    return path


# --- inspecting ---------------------------------------------------------------------------------
def _stats(args: argparse.Namespace) -> int:
    from gleanrl.experience import ExperiencePool
    from gleanrl.experience.pool import browse

    path = _existing(args)
    with ExperiencePool(path, read_only=True) as pool:
        known, sources = pool.stats(), pool.sources()
    with browse.reading(path) as db:
        difficulties, now, tokenizer = browse.difficulties(db), browse.newest_step(db), browse.tokenizer(db)
        successes, solved_tasks, failures, failed_tasks = browse.sizes(db)
        entropy, version, uses = (browse.values(db, column) for column in ("entropy", "version", "uses"))
    size = f"{format_bytes(known['bytes'])} of records in a file of {format_bytes(known['file_bytes'])}"
    print(f"{path}: {_count(successes, 'success')} of {_count(solved_tasks, 'task')}, {size}")
    if failures:
        size = format_bytes(known["failure_bytes"])
        print(f"{_count(failures, 'failure')} of {_count(failed_tasks, 'task')}, {size} of records")
    rows = []
    for d in difficulties:
        solved = f"{d.successes}/{d.attempts}" if d.attempts else "not tried"
        rows.append((solved, d.tasks, d.replayable, d.retired, d.trajectories))
    table(("solved", "tasks", "replayable", "retired", "trajectories"), rows)
    if known["outside"]:
        tasks = f"{known['outside']} of all {known['tasks']} tasks"
        print(f"{tasks} are not training tasks of the last run, which did not draw them")
    if sources:
        print(f"sources: {', '.join(f'{safe(name)} {count}' for name, count in sources.items())}")
    if entropy.size:
        print(f"entropy as recorded, nats a token: {spread(entropy, '.3f')}")
        print(f"age in versions at step {now}: {spread(now - version, '.0f')}")
        print(f"uses: {spread(uses, '.0f')}; {int((uses == 0).sum())} never used")
    evicted = ", ".join(f"{cause} {count}" for cause, count in known["evicted"].items())
    print(f"evicted so far: {evicted or 'none'}")
    if known["failures_evicted"]:
        evicted = ", ".join(f"{cause} {count}" for cause, count in known["failures_evicted"].items())
        print(f"failures evicted so far: {evicted}")
    print(f"tokenizer: {safe(tokenizer) if tokenizer else 'not known'}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import browse

    rows = []
    with browse.reading(_existing(args)) as db:
        for line in browse.lines(db, args.task, args.limit or -1, failures=args.failures):
            sampled = (line.key, line.version, line.step, line.uses, f"{line.entropy:.3f}", f"{line.temperature:g}")
            solved = f"{line.successes}/{line.attempts}{' retired' if line.retired else ''}"
            rows.append((*sampled, line.bytes, safe(line.source), solved, safe(line.task)))
    if args.task is not None and not rows:
        print(f"no {'failure' if args.failures else 'trajectory'} of task {safe(args.task)}")
        return 0
    table(
        ("key", "version", "step", "uses", "entropy", "temperature", "bytes", "source", "solved", "task"), rows, left=3
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import browse, codec

    path = _existing(args)
    kind, listed = ("failure", "list --failures") if args.key < 0 else ("trajectory", "list")
    try:
        with browse.reading(path) as db:
            found = browse.entry(db, args.key)
    except codec.Damaged as error:
        raise UserError(f"{path}: {kind} {args.key} is damaged: {error}") from None
    if found is None:
        raise UserError(f"{path} has no {kind} {args.key}; `gleanrl pool {args.run} {listed}` shows the keys")
    line, trajectory = found.line, found.stored.trajectory
    print(f"{kind} {line.key} of task {safe(line.task)}, {safe(trajectory.id)}")
    parts = "".join(f", {safe(name)} {value:g}" for name, value in trajectory.score.parts.items())
    print(f"score {trajectory.score.value:g}{parts}; ended by {trajectory.stop.value}")
    print(f"{trajectory.sampled_tokens} of {trajectory.total_tokens} tokens sampled, entropy {line.entropy:.4f}")
    sampled = f"version {line.version} at temperature {line.temperature:g}"
    print(f"source {safe(line.source)}, sampled by {sampled}, stored in step {line.step}, used {line.uses} times")
    if trajectory.score.explanation:
        print(f"explanation: {safe(trajectory.score.explanation)}")
    for name, value in trajectory.info.items():
        print(f"info {safe(name)}: {safe(str(value))}")
    for number, segment in enumerate(trajectory.segments, 1):
        if len(trajectory.segments) > 1:
            print(f"\nsegment {number} of {len(trajectory.segments)}")
        for index, turn in enumerate(segment, 1):
            _show_turn(index, turn)
    return 0


def _show_turn(index: int, turn: Turn) -> None:
    what = "context" if turn.logprobs is None else f"sampled by version {turn.version}"
    tokens = f"{turn.tokens.size} token{'' if turn.tokens.size == 1 else 's'}"
    if turn.logprobs is not None and turn.tokens.size:
        tokens += f", mean log-prob {turn.logprobs.mean(dtype='f8'):.4f}"
    if turn.reward is not None:
        tokens += f", reward {turn.reward:g}"
    print(f"\n[{index}] {safe(str(turn.message.get('role', '?')))}: {what}, {tokens}")
    for text in safe(str(turn.message.get("content", "")), lines=True).split("\n"):
        print(f"    | {text}")
    if calls := turn.message.get("tool_calls"):
        print(f"    tool calls: {safe(str(calls))}")
    if turn.logprobs is None:
        cells = [str(token) for token in turn.tokens.tolist()]
    else:
        cells = [f"{token}:{logprob!s}" for token, logprob in zip(turn.tokens, turn.logprobs, strict=True)]
    row = "   "
    for cell in cells:
        if len(row) + 1 + len(cell) > WIDTH:
            print(row)
            row = "   "
        row += f" {cell}"
    if row.strip():
        print(row)


def _verify(args: argparse.Namespace) -> int:
    from gleanrl.experience import ExperiencePool
    from gleanrl.experience.pool import browse

    path = _existing(args)
    with ExperiencePool(path, read_only=True) as pool, terminal_progress().stage("verifying") as stage:
        faults = pool.verify(done=stage.advance)
    for fault in faults:
        print(f"{path}: {safe(fault)}")
    if not faults:
        with browse.reading(path) as db:
            successes, solved_tasks, failures, failed_tasks = browse.sizes(db)
        checked = f"{_count(successes, 'success')} of {_count(solved_tasks, 'task')}"
        checked += f" and {_count(failures, 'failure')} of {_count(failed_tasks, 'task')}" if failures else ""
        print(f"{path}: sound; {checked} read")
    return 1 if faults else 0


# --- changing -----------------------------------------------------------------------------------
def _prune(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import browse

    numbers = (args.max_age, args.keep, args.keep_failures)
    if numbers == (None, None, None) and not args.retired and args.source is None:
        raise UserError(
            "say what to evict: --max-age N, --keep N, --retired, --source NAME, --keep-failures N, or several of them"
        )
    with _opened(args) as pool:
        with browse.reading(pool.path) as db:
            chosen = browse.prunable(
                db,
                max_age=args.max_age,
                keep=args.keep,
                retired=args.retired,
                settings=pool.settings,
                source=args.source,
                keep_failures=args.keep_failures,
            )
        words = {"capacity": f"more than {args.keep} a task", "newer": f"more than {args.keep_failures} a task"}
        evicted: dict[str, list[str]] = {"success": [], "failure": []}  # what is evicted of each, by cause
        totals = dict.fromkeys(evicted, 0)
        for cause, keys in chosen.items():
            pool.evict(keys, cause)
            failures = sum(key < 0 for key in keys)
            for kind, count in (("success", len(keys) - failures), ("failure", failures)):
                if count:
                    evicted[kind].append(f"{words.get(cause, cause)}: {count}")
                    totals[kind] += count
        left = pool.stats()
        said = [f"{_count(totals[kind], kind)} ({', '.join(causes)})" for kind, causes in evicted.items() if causes]
        kept = _counts(left["trajectories"], left["failures"], bool(left["failures"] or totals["failure"]))
        print(f"evicted {' and '.join(said) or 'nothing'}; {kept} left")
    return 0


def _export(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import browse, transfer

    path = _existing(args)
    with browse.reading(path) as db:
        successes, _, failures, _ = browse.sizes(db)
    with terminal_progress().stage("exporting", successes + failures * args.failures) as stage:
        solved, failed, damaged = transfer.export_parquet(path, args.file, failures=args.failures, done=stage.advance)
    for line in damaged:
        print(f"left out: {safe(line)}", file=sys.stderr)
    print(f"{args.file}: {_counts(solved, failed, args.failures)}")
    return 1 if damaged else 0


def _import(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import transfer

    tokenizer = _agree_on_tokenizer(args, transfer.parquet_tokenizer(args.file), args.file)
    with _opened(args, tokenizer=tokenizer, make=True) as pool:
        with terminal_progress().stage("importing") as stage:
            moved = transfer.import_parquet(
                pool, args.file, label=args.source, failures=args.failures, done=stage.advance
            )
        _report(moved, args.failures)
    return 0


def _seed(args: argparse.Namespace) -> int:
    from gleanrl.experience.pool import browse, transfer
    from gleanrl.runtime import demonstrations, experience
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console

    count: int | None = args.demonstrations
    label: str | None = args.source
    if args.failures and args.pool is None:
        raise UserError("--failures of `seed` needs --pool, because rollouts and demonstrations give successes only")
    if args.pool is not None:
        source = find_pool(args.pool)
        with browse.reading(source) as db:
            theirs = browse.tokenizer(db)
    else:
        if count is not None and Path(args.run).suffix == ".sqlite" and not Path(args.run).is_dir():
            raise UserError(f"{args.run} has no tasks and no policy, which demonstrations need; give a run's folder")
        source = RunFolder.existing(_run_path(args.rollouts or args.run))
        theirs = experience.saved_tokenizer(source)
    tokenizer = _agree_on_tokenizer(args, theirs, args.pool or args.rollouts or args.run)
    with _opened(args, tokenizer=tokenizer, make=count is None) as pool:
        with browse.reading(pool.path) as db:
            now = browse.newest_step(db)
        copied: dict[str, Any] = {"step": now, "trust": args.trust_tokenizer, "label": label}
        if isinstance(source, Path):
            with browse.reading(source) as db:
                successes, _, failures, _ = browse.sizes(db)
            with terminal_progress().stage("seeding", successes + failures * args.failures) as stage:
                moved = transfer.seed_from_pool(pool, source, **copied, failures=args.failures, done=stage.advance)
                _report(moved, args.failures)
        elif count is None:
            _report(experience.seed_from_rollouts(pool, source, **copied, progress=terminal_progress()), False)
        else:
            moved, policy = demonstrations.seed_from_demonstrations(
                pool, source, count, step=now, console=Console(), label=label
            )
            _report(moved, False)
            print(
                f"The expert's log-probs are unknown, so those of the policy at step {policy} were stored instead. The "
                "importance weight therefore measures how far the policy has moved since that step. It does not "
                "correct for the difference between the expert and the policy."
            )
    return 0


def _agree_on_tokenizer(args: argparse.Namespace, theirs: str | None, of: object) -> str | None:
    """Check that the pool may store token ids of the source ``of``, whose tokenizer has the fingerprint ``theirs``.

    Returns the tokenizer fingerprint with which to open the pool; None if neither side has one. Raises `UserError` if
    the tokenizers differ.
    """
    from gleanrl.experience.pool import transfer

    return transfer.check_tokenizers(find_pool(args.run), theirs, of, trust=args.trust_tokenizer) or theirs


def _report(moved: Moved, failures: bool) -> None:
    left_out = "".join(f"; left out {count}: {reason}" for reason, count in moved.left_out.items())
    print(f"stored {_counts(moved.stored, moved.failures, failures)}{left_out}")


def _counts(successes: int, failures: int, both: bool) -> str:
    """Return for example "1 success and 2 failures", without the failures unless ``both``."""
    return _count(successes, "success") + (f" and {_count(failures, 'failure')}" if both else "")


def _count(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"
