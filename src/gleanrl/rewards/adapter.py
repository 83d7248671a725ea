"""Adapts the rewards that users write to the interface `Scorer`, which the reward agent calls.

`load_reward` accepts a function, a class, an object, or the import path of one of these. The reward may have Glean RL's
own signature, verl's or TRL's. The built-in rewards that are subclasses of `Scorer` need no adapter.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, get_origin, get_type_hints

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.executors import Processes, Threads
from gleanrl.rewards.request import NotApplicable, Request, Scorer, as_score, finite, merge_post_processed, shorten
from gleanrl.types import GROUP_SIZE, GROUP_UID, Message, Score, Task
from gleanrl.utils.errors import UserError, raised_at
from gleanrl.utils.http import to_jsonable
from gleanrl.utils.importing import load_object
from gleanrl.utils.retry import Fatal, Retryable, cause_of, is_retryable, wait_asked_for
from gleanrl.utils.secrets import redact, refuse_keys, with_keys
from gleanrl.utils.text import first_line, nearest

if TYPE_CHECKING:
    from gleanrl.rewards.journal import Journal

log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, str] = {
    "environment": "gleanrl.rewards.request:own_score",
    "format": "gleanrl.rewards.text:Format",
    "group_judge": "gleanrl.rewards.group_judge:GroupJudge",
    "http": "gleanrl.rewards.http:HttpReward",
    "judge": "gleanrl.rewards.judge:Judge",
    "length": "gleanrl.rewards.text:Length",
    "math": "gleanrl.rewards.math:MathReward",
    "model": "gleanrl.rewards.model:RewardModel",
    "overlong": "gleanrl.rewards.text:Overlong",
    "pooling": "gleanrl.rewards.model:PoolingServer",
    "repetition": "gleanrl.rewards.text:Repetition",
    "rubric": "gleanrl.rewards.rubric:RubricJudge",
    "weighted": "gleanrl.rewards.compose:Weighted",
}
"""Import path of each reward that has a short name, by this name."""

Style = Literal["gleanrl", "verl", "trl"]


def load_reward(
    reward: Any, *, options: Mapping[str, Any] | None = None, settings: RewardSettings | None = None
) -> Scorer:
    """Return a `Scorer` that calls ``reward``.

    A reward is a function ``fn(request)``, or a class or an instance with a method ``compute_score(request)``. It
    returns a number, a `Score`, or a mapping with the key ``score``. A class or instance may also have a method
    ``post_process_scores(list[Score]) -> list``, a text ``version`` (`Scorer.version`) and, if it is async, an int
    ``slots``, the maximum number of its concurrent calls. Functions and methods may be sync or async. A reward that is
    computed in this process may have the attribute ``calls_service = False`` (`Scorer.calls_service`).

    Args:
        reward: the reward itself (a `Scorer` is returned as it is), or its name. A name is a key of `BUILT_IN`,
            ``package.module:name`` or ``file.py:name``. If the reward has the signature of verl or TRL, pass the object
            through `verl` or `trl`, or write the prefix ``verl:`` or ``trl:`` before its name.
        options: keyword arguments for the constructor of a class, or additional keyword arguments for a function.
        settings: passed to `Scorer.configure`. A sync reward runs in threads or processes as ``isolation``, ``workers``
            and ``timeout_s`` define. A `RewardAdapter` that was configured before keeps its first settings. None = the
            scorer is not configured and uses the defaults.

    Raises:
        UserError: no reward has this name, the object cannot be called and has no ``compute_score``, an option is
            unknown or missing, or an object that is made already gets options.
    """
    scorer = _RewardSpec.of(reward, dict(options or {})).make()
    if settings is not None:
        scorer.configure(settings)
    return scorer


def check_reward(reward: Any, *, options: Mapping[str, Any] | None = None) -> None:
    """Check a reward and its options without creating an instance of a class, which may take minutes.

    If the reward is a class with a classmethod ``check(**options)``, this method is called too. It raises `UserError`
    if an option is invalid.

    Raises:
        UserError: there is an error that `load_reward` would raise and that can be found without an instance, or the
            options contain a secret key in plain text.
    """
    spec = _RewardSpec.of(reward, dict(options or {}))
    found, name = spec.find()
    if isinstance(found, type):
        check_options(name, found, spec.options)
        if not hasattr(found, "compute_score") and not any("__call__" in vars(base) for base in found.__mro__):
            raise UserError(f"reward {name} is a class without a method compute_score")
    else:
        spec.make()
    refuse_keys(spec.options, "reward.options")
    check = getattr(found, "check", None)
    if isinstance(found, type) and inspect.ismethod(check):
        with named_errors(f"reward {name}"):
            try:
                check(**spec.options)
            except (TypeError, ValueError, AttributeError) as error:
                if not found.__module__.startswith("gleanrl.rewards."):
                    raise
                # The options of the built-in rewards come from a file, in which any value may have a wrong type.
                raise UserError(f"a value of reward.options has a wrong type: {first_line(error)}") from None


def verl(reward: Callable[..., Any] | type) -> Any:
    """Mark a function, class or object as a reward with verl's signature (`VerlAdapter`), for `load_reward`.

    If the reward is given by its name, write the prefix ``verl:`` before the name instead.
    """
    return _RewardSpec(reward, "verl")


def trl(reward: Callable[..., Any]) -> Any:
    """Mark a function as a reward with TRL's signature (`TrlAdapter`), for `load_reward`.

    If the reward is given by its name, write the prefix ``trl:`` before the name instead.
    """
    return _RewardSpec(reward, "trl")


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Add the prefix ``name: `` to the message of a `UserError` that is raised in the ``with`` block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


@dataclass(frozen=True)
class _RewardSpec:
    """A reward (object or name), its signature and its options.

    `make` creates the scorer from them: in this process, or in a worker process, to which the spec is pickled.
    """

    reward: Any
    style: Style = "gleanrl"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reward: Any, options: Mapping[str, Any]) -> _RewardSpec:
        if isinstance(reward, _RewardSpec):
            return replace(reward, options=options)
        if isinstance(reward, str):
            prefix, _, rest = reward.partition(":")
            if prefix in ("verl", "trl") and ":" in rest:
                return cls(rest, "verl" if prefix == "verl" else "trl", options)
        return cls(reward, "gleanrl", options)

    def find(self) -> tuple[Any, str]:
        """Return the reward object and its name for error messages.

        Raises:
            UserError: no object has this name, or its signature is verl's or TRL's and its style is not set.
        """
        if isinstance(self.reward, str) and ":" not in self.reward:
            if self.reward not in BUILT_IN:
                known = f"; there are {', '.join(BUILT_IN)}, or give `package.module:name` or `file.py:name`"
                raise UserError(f"no reward {self.reward!r}{nearest(self.reward, BUILT_IN) or known}")
            return load_object(BUILT_IN[self.reward]), self.reward
        if isinstance(self.reward, str):
            found, name = load_object(self.reward), self.reward
        else:
            found, name = self.reward, getattr(self.reward, "__qualname__", type(self.reward).__qualname__)
        if self.style == "gleanrl":
            parameters: Mapping[str, Any] = {}
            with suppress(TypeError, ValueError):  # functions written in C may have no signature
                parameters = inspect.signature(getattr(found, "compute_score", found)).parameters
            for style, parameter in (("trl", "completions"), ("verl", "solution_str")):
                if parameter in parameters:
                    mark = f"{style}:{name}" if isinstance(self.reward, str) else f"{style}({name})"
                    raise UserError(f"reward {name} has the parameter {parameter!r} of {style} rewards; give {mark}")
        return found, name

    def make(self) -> Scorer:
        found, name = self.find()
        if isinstance(found, Scorer):
            if self.options:
                raise UserError(_MADE_ALREADY.format(name))
            return found
        if not (isinstance(found, type) and issubclass(found, Scorer)):
            return _ADAPTERS[self.style](found, name, self)
        check_options(name, found, self.options)
        with named_errors(f"reward {name}"):
            return found(**self.options)


class RewardAdapter(Scorer):
    """A `Scorer` that calls a user's function or object and converts its result to a `Score`.

    An async reward runs on the event loop. A sync reward runs in a thread or, if ``isolation = "process"``, in a worker
    process, which is killed if a call exceeds its time limit. Each worker process creates its own copy of the adapter
    from ``spec``.

    This class calls rewards with Glean RL's signature. Subclasses for other signatures override `call_reward`, `read`,
    `post_process` and `arguments`.
    """

    arguments = 1
    """Number of leading parameters of a reward function that are not options; -1 = unknown."""
    replaces_failures = False
    """Whether a number that post-processing returns for a failed member becomes its score (`merge_post_processed`)."""

    def __init__(self, found: Any, name: str, spec: _RewardSpec) -> None:
        options = spec.options
        keys, self._secrets = with_keys(options)
        is_class = isinstance(found, type)
        if is_class:
            check_options(name, found, options)
            try:
                with named_errors(f"reward {name}"):
                    found = found(**keys)
            except TypeError as error:
                raise UserError(f"reward {name}: {error}") from None
        method = getattr(found, "compute_score", found)
        if not callable(method):
            raise UserError(f"reward {name} is {type(found).__name__}: neither a function nor has it compute_score")
        if not is_class and method is not found and options:
            raise UserError(_MADE_ALREADY.format(name))
        if not is_class and method is found:
            check_options(name, found, options, given=self.arguments)
        self.reward, self._spec, self._name = found, spec, name
        self._call = partial(method, **keys) if options and not is_class else method
        self._is_async = inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)
        self.post_processes = not self.scores_groups and getattr(found, "post_process_scores", None) is not None
        self.calls_service = bool(getattr(found, "calls_service", True))
        version = getattr(found, "version", None)
        self._unknown_state = False  # whether the version does not cover the attributes of a made object
        self.version = version if isinstance(version, str) else self._hash_source(made=not is_class)
        slots = getattr(found, "slots", None)
        self.slots = slots if isinstance(slots, int) else None
        if not self._is_async:
            self.slots, self.lane_slots = None, RewardSettings().workers
        elif self.slots is not None and self.slots < 1:
            raise UserError(f"reward {name}: slots is {slots}, but must be at least 1 (None = no limit)")
        self._configured = False
        self._threads: Threads | None = None
        self._processes: Processes | None = None

    def _hash_source(self, *, made: bool) -> str:
        """Return a hash of the reward's source files and options, so that scores of before a change are not used.

        For a decorated function, these are the files of the decorator and of the function itself. The hash also covers
        the arguments of a `functools.partial`, the values that a nested function has captured and, if the user has
        ``made`` the object, its attributes.
        """
        found, state = self.reward, []
        while isinstance(found, partial):
            state.append([getattr(found.func, "__qualname__", ""), found.args, found.keywords])
            found = found.func
        target = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
        options = json.dumps(dict(self._spec.options), sort_keys=True, default=repr)
        hashed = hashlib.blake2b("\0".join([type(self).__name__, self._name, options]).encode(), digest_size=8)
        for source in (target, inspect.unwrap(found)) if hasattr(found, "__wrapped__") else (target,):
            with suppress(TypeError, OSError):
                hashed.update(Path(inspect.getsourcefile(source) or "").read_bytes())
        try:
            if inspect.isfunction(found) and (captured := _captured(found)):
                state.append(captured)
            holder = found.__self__ if inspect.ismethod(found) else found
            if made and not inspect.isclass(holder) and not inspect.isroutine(holder):
                attributes = holder.__getstate__()  # of an object with slots too; None if there are none
                state += [] if attributes is None else [attributes]
            if state:
                hashed.update(json.dumps(state, sort_keys=True, default=to_jsonable).encode())
        except (TypeError, ValueError, RecursionError):  # the last two: an attribute contains itself
            self._unknown_state = True
        return hashed.hexdigest()

    def use_journal(self, journal: Journal | None) -> None:
        if journal is not None and self._unknown_state:
            log.warning(
                "reward %s holds objects that are no plain data, so the journal returns its old scores after they have "
                "changed; give it an attribute `version`, a text to change with them",
                self._name,
            )

    def configure(self, settings: RewardSettings) -> None:
        if self._configured:
            return
        self._configured = True
        if self._is_async:
            if settings.isolation == "process":
                log.warning(
                    "reward %s is async and stays on the event loop; isolation = 'process' is for others", self._name
                )
            return
        self.lane_slots = settings.workers
        if settings.isolation == "process":
            # Twice the number, because evaluation has workers of its own. A process is started when a call needs it.
            self._processes = Processes(self._spec.make, 2 * settings.workers, settings.timeout_s)
            self.own_timeout = True
        else:
            self._threads = Threads()

    async def __call__(self, request: Request) -> Score:
        score: Score = await self._execute(partial(self.read, request), self.call_reward, request)
        if self._secrets:
            parts = {redact(name, self._secrets): value for name, value in score.parts.items()}
            explanation = None if score.explanation is None else redact(score.explanation, self._secrets)
            score = replace(score, parts=parts, explanation=explanation)
        return score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        merge = partial(merge_post_processed, scores, replaces_failures=self.replaces_failures)
        return await self._execute(merge, self.post_process, scores)

    async def aclose(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            # The agent may be opened again. Threads that were shut down take no calls.
            self._threads = Threads()
        if self._processes is not None:
            await self._processes.close()
        close = getattr(self.reward, "aclose", None) or getattr(self.reward, "close", None)
        if close is not None and not isinstance(self.reward, type):
            returned = close()
            if inspect.isawaitable(returned):
                await returned

    async def _execute(self, read: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
        """Call ``method`` of this adapter and return ``read(result)``.

        The call runs on the event loop, in a thread or in a worker process, as configured. If the message of an error
        contains a secret key of the reward, an error with the redacted message is raised instead.
        """
        if not self._configured:
            self.configure(RewardSettings())
        try:
            if self._processes is not None:
                return read(await self._processes.call(method.__name__, *args))
            returned = method(*args) if self._threads is None else await self._threads.call(method, *args)
            return read(await returned if inspect.isawaitable(returned) else returned)
        except (Exception, SystemExit) as error:
            text = redact(str(error), self._secrets)
            if text == str(error):
                raise
            if isinstance(error, UserError):
                raise UserError(text) from None
            if is_retryable(error):
                raise Retryable(text, wait_asked_for(error) or None, cause=cause_of(error)) from None
            if not isinstance(error, Fatal):
                text = f"{type(error).__name__}: {text}{raised_at(error)}"
            raise Fatal(text, cause=cause_of(error)) from None

    def call_reward(self, request: Request) -> Any:
        """Call the reward with a request. Returns the reward's result unchanged, or an awaitable of it."""
        return self._call(request)

    def read(self, request: Request, returned: Any) -> Score:
        """Convert the reward's result to a `Score`. Raises `Fatal` if the result contains no score."""
        return as_score(returned)

    def post_process(self, scores: Sequence[Score]) -> Any:
        """Call the reward's ``post_process_scores`` with the scores of a group.

        Returns the method's result unchanged, or an awaitable of it.
        """
        return self.reward.post_process_scores(list(scores))


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values that a nested function has captured, by name. A captured function stands for its own values."""
    nonlocals = inspect.getclosurevars(function).nonlocals
    return {name: _captured(value) if inspect.isfunction(value) else value for name, value in nonlocals.items()}


class VerlAdapter(RewardAdapter):
    """Calls a reward with verl's signature ``compute_score(data_source, solution_str, ground_truth, extra_info)``.

    The reward returns a number, a mapping with the key ``score``, or a tuple ``(score, prompt, explanation)``, whose
    ``prompt`` is appended to the explanation. It may also have a method
    ``post_process_scores(list[float | None]) -> list[float | None]``. The list holds the scores of the whole group;
    None stands for a member that has none. A number that is returned in place of None becomes the member's score.

    The payload of each task is a row of a dataset in verl's format: ``data_source``, ``reward_model.ground_truth`` and
    optionally ``extra_info``, to which ``group_uid`` and ``group_size`` are added. ``solution_str`` is the text of all
    messages from the model's first message on.
    """

    arguments = 4
    replaces_failures = True

    def call_reward(self, request: Request) -> Any:
        row = request.task.payload
        try:
            source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        except (KeyError, TypeError):
            raise UserError(
                f"reward verl:{self._name} needs data_source and reward_model.ground_truth in the payload of task "
                f"{request.task.id!r}, which has {', '.join(row) or 'nothing'}"
            ) from None
        _, played = split_at_first_answer(request)
        text = "\n".join(message["content"] or "" for message in played)
        extra = dict(row.get("extra_info") or {})
        extra |= {name: request.info[name] for name in (GROUP_UID, GROUP_SIZE) if name in request.info}
        return self._call(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)

    def read(self, request: Request, returned: Any) -> Score:
        if not isinstance(returned, tuple):
            return as_score(returned)
        if len(returned) != 3:
            raise Fatal(f"a tuple of {len(returned)}, not (score, prompt, explanation)", cause="not_a_number")
        score, prompt, explanation = returned
        said = [] if explanation is None else [str(explanation)]
        if prompt:
            said.append(f"The prompt of the judge:\n{prompt}")
        return replace(as_score(score), explanation=shorten("\n\n".join(said)) if said else None)

    def post_process(self, scores: Sequence[Score]) -> Any:
        return self.reward.post_process_scores([score.value if score.valid else None for score in scores])


class TrlAdapter(RewardAdapter):
    """Calls a reward function with TRL's signature.

    The signature is ``fn(prompts, completions, completion_ids, **columns) -> list[float | None]``. The members of a
    group are scored in one call, with one row for each member. Each other trajectory is scored in a call of its own,
    with one row: those of an evaluation, and those that are scored by a part of a weighted sum. The columns are the
    entries of the payloads, with None for a row whose payload has no such entry. ``completion_ids`` are the sampled
    token ids of all turns, or None if a text is scored. If a payload has a text ``prompt``, the row's prompt and
    completion are texts (TRL's standard format). Otherwise they are lists of messages (TRL's conversational format). If
    the function returns None as a score, the reward does not apply to the trajectory.
    """

    # The columns depend on the tasks. -1 therefore means that missing arguments cannot be found before the first call.
    arguments = -1
    scores_groups = True

    def call_reward(self, request: Request) -> Any:
        rows = request.group or (request,)
        prompts: list[Any] = []
        completions: list[Any] = []
        for row in rows:
            prompt, completion = split_at_first_answer(row)
            text = row.task.payload.get("prompt")
            prompts.append(text if isinstance(text, str) else prompt)
            completions.append(row.response if isinstance(text, str) else completion)
        names = dict.fromkeys(name for row in rows for name in row.task.payload if name not in _TRL_ARGUMENTS)
        columns = {name: [row.task.payload.get(name) for row in rows] for name in names}
        sampled = [row.sampled for row in rows if row.sampled is not None]
        ids = [[token for turn in turns for token in turn.tolist()] for turns in sampled]
        given = ids if len(ids) == len(rows) else None
        return self._call(prompts=prompts, completions=completions, completion_ids=given, **columns)

    def read(self, request: Request, returned: Any) -> Score:
        rows = len(request.group) or 1
        try:
            values = list(returned)
        except TypeError:
            values = []
        if len(values) != rows:
            said = shorten(repr(returned), 80)
            raise Fatal(f"{said} is not a list of {rows} scores, one for each completion", cause="not_a_number")
        if not request.group:
            if values[0] is None:
                raise NotApplicable
            return as_score(values[0])
        parts = {}
        for index, value in enumerate(values):
            if value is not None:
                read = finite(value)
                parts[str(index)] = math.nan if read is None else read
        return Score(0.0, parts=parts)


_MADE_ALREADY = "reward {} is made already and takes no options; name its class instead"
_TRL_ARGUMENTS = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
_ADAPTERS: Mapping[str, type[RewardAdapter]] = {"gleanrl": RewardAdapter, "verl": VerlAdapter, "trl": TrlAdapter}


def split_at_first_answer(request: Request) -> tuple[list[Message], list[Message]]:
    """Return two lists: the messages before the model's first message, and the messages from it on.

    Messages of the assistant in the task's prompt are examples, which the model has not written. An agent may leave
    them out.
    """
    examples = [message["content"] for message in request.task.prompt if message["role"] == "assistant"]
    answers = [number for number, message in enumerate(request.messages) if message["role"] == "assistant"]
    if [request.messages[number]["content"] for number in answers[: len(examples)]] == examples:
        answers = answers[len(examples) :]
    first = answers[0] if answers else len(request.messages)
    return list(request.messages[:first]), list(request.messages[first:])


def check_options(name: str, target: Callable[..., Any], options: Iterable[str], *, given: int = 0) -> None:
    """Raise `UserError` if ``target``, a class or function, does not accept an option or needs one that is missing.

    ``given`` is the number of leading parameters that are not options. -1 means that this number is unknown; missing
    options are then not reported.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)][max(given, 0) :]
    known = [parameter.name for parameter in named]
    takes_any = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            # ``**kwargs`` accept any option, unless they are annotated with `Unpack` of a `TypedDict`. In this case the
            # options are the keys of the `TypedDict`.
            try:
                hint = get_type_hints(target.__init__ if isinstance(target, type) else target).get(parameter.name)
            except (NameError, TypeError):
                hint = None
            if get_origin(hint) is Unpack:
                known += get_type_hints(get_args(hint)[0])
            else:
                takes_any = True
    for option in options:
        if not takes_any and option not in known:
            takes = f"; it takes {', '.join(known)}" if known else "; it takes none"
            raise UserError(f"reward {name} has no option {option!r}{nearest(option, known) or takes}")
    for parameter in named if given >= 0 else ():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"reward {name} needs the option {parameter.name!r}")
