"""Scores answers to mathematical problems with `math-verify`, by value: 1/2, 0.5 and \\frac{2}{4} are the same answer.

A computer algebra system may compute without end on the text of a model. Worker processes therefore parse and compare
the answers, with limits of processor time and of memory. Processor time is limited rather than wall time, so that no
answer counts as wrong because the machine is busy. If an answer hangs in code that Python cannot interrupt, its process
is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import resource
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gleanrl.rewards.executors import Processes
from gleanrl.rewards.http import version_of
from gleanrl.rewards.request import Request, Scorer
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable

if TYPE_CHECKING:
    from gleanrl.config.settings import RewardSettings

Extract = Literal["auto", "boxed", "tags", "last_number"]
Compare = Literal["math", "text"]

GOLD = ("reward_model.ground_truth", "answer", "ground_truth", "solution")  # default paths of the right answer
LONGEST = 20_000  # only this many characters at the end of a response are searched for the answer
KILL_S = 30.0  # a process is killed if a call takes this many seconds of wall time plus four times ``timeout_s``
MEMORY = 2 << 30  # bytes that a process may allocate in addition to those it starts with
_SIGN = r"(?:(?<![\w.)\]}%])[-\u2212])?"  # a minus after a word, a number or a bracket is a subtraction, not a sign
_NUMBER = re.compile(rf"{_SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?:/\d+)?|{_SIGN}\.\d+")
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")


class MathReward(Scorer):
    """Scores whether the last assistant message gives the right answer to the task.

    The score is ``(1 - format_weight) * correct + format_weight * formatted``. `Score.parts` contains four values, each
    0 or 1: ``correct``, ``extracted`` (an answer was found), ``formatted`` (the answer is where ``extract`` expects it)
    and ``timed_out`` (parsing and comparing exceeded a limit of time or memory, so the answer counts as wrong).
    Thinking is removed from the message (`rollout.thinking.answer_of`), so an answer in a truncated thought does not
    count.

    Args:
        answer: path of the right answer in the task's payload, e.g. ``extra_info.answer``; None = the first that exists
            of ``reward_model.ground_truth``, ``answer``, ``ground_truth``, ``solution``. The right answer is a number,
            a text, or a list of alternatives. If a text contains ``\\boxed{}`` or ``####``, the right answer is the
            content of the box or the text after ``####``.
        extract: which part of the message is its answer. ``auto``: the last ``\\boxed{}``, else the expression that
            `math-verify` finds. ``boxed``: only the last ``\\boxed{}``. ``tags``: the text in the last
            ``<answer></answer>``. ``last_number``: the first number after ``####``, else the last number.
        compare: ``math`` compares by mathematical value, ``text`` compares words and letters without regard to case
            and spaces.
        format_weight: weight of ``formatted`` in the score, from 0 to 1.
        timeout_s: limit for parsing and comparing an answer, in seconds of processor time.

    Raises:
        UserError: `math-verify` is not installed, or an argument is invalid.
    """

    own_timeout = True
    calls_service = False

    def __init__(
        self,
        *,
        answer: str | None = None,
        extract: Extract = "auto",
        compare: Compare = "math",
        format_weight: float = 0.0,
        timeout_s: float = 5.0,
    ) -> None:
        if compare == "math" and importlib.util.find_spec("math_verify") is None:
            raise UserError("needs the extra: pip install 'gleanrl[math]'")
        if answer is not None and not isinstance(answer, str):
            raise UserError(f"answer = {answer!r}: name a column")
        for name, value, kinds in (("extract", extract, get_args(Extract)), ("compare", compare, get_args(Compare))):
            if value not in kinds:
                raise UserError(f"{name} = {value!r}: one of {', '.join(kinds)}")
        if isinstance(format_weight, bool) or not 0.0 <= format_weight <= 1.0:
            raise UserError(f"format_weight = {format_weight!r}: a share from 0 to 1")
        if isinstance(timeout_s, bool) or not 0.0 < timeout_s <= 3600.0:
            raise UserError(f"timeout_s = {timeout_s!r}: seconds, above 0")
        self._paths = GOLD if answer is None else (answer,)
        self._weight, self._timeout_s = format_weight, timeout_s
        self._make = partial(Grader, extract, compare, timeout_s)
        self._processes: Processes | None = None
        self.slots = self._workers = os.cpu_count() or 1
        self.version = version_of(["math 2", answer, extract, compare, format_weight, timeout_s])

    @classmethod
    def check(cls, **options: Any) -> None:
        """Check the arguments of the class."""
        cls(**options)  # the constructor checks the options and starts no process

    def configure(self, settings: RewardSettings) -> None:
        """Use ``settings.workers`` processes, but at most one per core, because each keeps a core busy."""
        self.slots = self._workers = min(settings.workers, os.cpu_count() or 1)

    async def __call__(self, request: Request) -> Score:
        """Score the answer of a request.

        Raises:
            Fatal: the task's right answer cannot be parsed.
            UserError: the task's payload contains no right answer.
        """
        task, found = request.task, None
        for path in self._paths:
            found = task.payload
            for name in path.split("."):
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                break
        else:
            has = ", ".join(task.payload) or "nothing"
            raise UserError(
                f"reward math: task {task.id!r} has no {', '.join(self._paths)} but {has}; set reward.options.answer"
            )
        gold = [str(one) for one in (found if isinstance(found, list | tuple) else [found])]
        response = answer_of(request.response)[-LONGEST:]
        if self._processes is None:
            self._processes = Processes(self._make, self._workers, KILL_S + 4.0 * self._timeout_s)
        try:
            graded: Graded = await self._processes.call("grade", response, gold)
        except Retryable as error:
            if error.cause != "timeout":
                raise
            graded = Graded(timed_out=True)
        if graded.unreadable is not None:
            raise Fatal(f"the right answer of task {task.id!r} is none: {graded.unreadable!r}", cause="answer")
        value = (1.0 - self._weight) * graded.correct + self._weight * graded.formatted
        parts = {name: float(getattr(graded, name)) for name in ("correct", "extracted", "formatted", "timed_out")}
        return Score(value, parts=parts, explanation=f"{graded.read or 'no answer'}, for {' or '.join(gold)}")

    async def aclose(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            await processes.close()


# --- in a process of its own ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Graded:
    """The result of parsing and comparing one answer. `MathReward` explains the first four fields."""

    correct: bool = False
    extracted: bool = False
    formatted: bool = False
    timed_out: bool = False
    read: str = ""  # the answer as extracted from the message
    unreadable: str | None = None  # the right answer if it could not be parsed, else None


class _TooLong(BaseException):  # not an `Exception`, because the libraries that run in the block may catch those
    pass


class Grader:
    """Parses and compares answers. Runs in the main thread of a worker process, because it uses a signal handler."""

    def __init__(self, extract: Extract, compare: Compare, timeout_s: float) -> None:
        self._extract: Extract = extract
        self._compare, self._timeout_s = compare, timeout_s
        for name in ("math_verify.parser", "math_verify.grader"):
            # math-verify would log a warning for each answer, because its own timeouts are switched off.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if compare == "math":
            # The first call imports packages, which takes about a second and must not count for the first answer.
            _parse("$1$")
        with contextlib.suppress(OSError, ValueError):  # /proc does not exist, or a lower limit is already set
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))

    def grade(self, response: str, gold: list[str]) -> Graded:
        """Extract the answer of ``response`` and compare it with each right answer in ``gold``.

        If a right answer contains ``\\boxed{}`` or ``####``, only the content of the box or the text after ``####`` is
        compared.
        """
        answer, formatted = None, False
        try:
            with _processor_time(self._timeout_s):
                answer, formatted = extract_answer(response, self._extract)
                rights = []
                for text in gold:
                    box = find_boxed(text)
                    rights.append(text.rpartition("####")[2].strip() if box is None else box)
                if self._compare == "text" or (answer is not None and answer in rights):
                    correct = answer is not None and any(_plain(answer) == _plain(right) for right in rights)
                    return Graded(correct, answer is not None, formatted, read=answer or "")
                from math_verify import verify

                golds = []
                for right in rights:
                    parsed = _parse_answer(right)
                    if not parsed:
                        return Graded(unreadable=right)
                    golds.append(parsed)
                if answer is not None:
                    found = _parse_answer(answer)
                elif self._extract == "auto":
                    found = _parse(response)
                else:
                    return Graded(formatted=formatted)
                correct = bool(found) and any(verify(gold, found, timeout_seconds=None) for gold in golds)
                return Graded(correct, bool(found), formatted, read=answer or str(found[-1] if found else ""))
        except (_TooLong, MemoryError, RecursionError):
            return Graded(extracted=answer is not None, formatted=formatted, timed_out=True, read=answer or "")


def extract_answer(response: str, extract: Extract) -> tuple[str | None, bool]:
    """Return the answer in ``response`` (None if there is none), and whether it is where ``extract`` expects it."""
    if extract == "tags":
        found = _TAGS.findall(response)
        if not found:
            return None, False
        box = find_boxed(found[-1])
        return (found[-1] if box is None else box).strip(), True
    if extract == "last_number":
        _, mark, rest = response.rpartition("####")
        numbers = _NUMBER.findall(rest)
        if not numbers:
            return None, False
        return numbers[0 if mark else -1].replace(",", "").replace("\u2212", "-"), True
    box = find_boxed(response)
    return box, box is not None


def find_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` whose braces are closed, or None if there is none."""
    opened: list[int] = []  # for each open brace, where the content of its box begins, or -1 if it opens no box
    begin = end = -1
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(-1)
        elif brace[0] != "}":
            opened.append(brace.end())
        elif opened and (inside := opened.pop()) > begin:
            begin, end = inside, brace.start()
    return None if begin < 0 else text[begin:end].strip()


def _plain(text: str) -> str:
    """Normalise an answer for a comparison as text.

    The result is in lower case, without ``\\text{}``, enclosing dollar signs, a final full stop and repeated spaces.
    One pair of enclosing brackets is removed, or the bracket after an option, as in ``B)``.
    """
    inside = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip("$ \t\r\n").removesuffix(".").strip("$ \t\r\n")
    if inside.endswith(")") and "(" not in inside.removeprefix("("):
        inside = inside.removeprefix("(").removesuffix(")")
    return " ".join(inside.split()).casefold()


def _parse_answer(answer: str) -> list[Any]:
    """Parse an answer as mathematics with `math-verify`. Returns an empty list if that fails."""
    whole = f"${answer}$" if "$" not in answer and not answer.startswith(r"\(") else answer
    return _parse(whole) or _parse(answer)


def _parse(text: str) -> list[Any]:
    """Extract the mathematical expressions from a text with `math-verify`. Returns an empty list if there are none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configurations: Any = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return parse(text, configurations, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the ``with`` block after ``seconds`` of processor time.

    It is raised again every 0.5 seconds, in case that code in the block catches and ignores it.
    """

    def raises(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, raises)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
