"""Rewards as users write them, as a `Scorer` that the agent calls.

`load_reward` takes a function, a class or an object, in Glean RL's own form or in that of verl or TRL, or the name of
one. Rewards that need no adapter (judge, http, math, model, weighted) are `Scorer` classes themselves.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.executors import Processes, Threads
from gleanrl.rewards.request import NotApplicable, Request, Scorer
from gleanrl.rewards.returned import as_score, merge_post_processed, shorten, shown
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.retry import Fatal, Retryable, cause_of, is_retryable, wait_asked_for
from gleanrl.utils.secrets import redact, refuse_keys, with_keys
from gleanrl.utils.text import nearest

log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, str] = {
    "environment": "gleanrl.rewards.environment:own_score",
    "http": "gleanrl.rewards.http:HttpReward",
    "judge": "gleanrl.rewards.judge:Judge",
    "math": "gleanrl.rewards.math:MathReward",
    "model": "gleanrl.rewards.model:RewardModel",
    "pooling": "gleanrl.rewards.model:PoolingServer",
    "weighted": "gleanrl.rewards.compose:Weighted",
}
"""Rewards that have a short name, with their import paths."""

Style = Literal["gleanrl", "verl", "trl"]


def load_reward(
    reward: Any, *, options: Mapping[str, Any] | None = None, settings: RewardSettings | None = None
) -> Scorer:
    """A scorer of a reward or of its name.

    Args:
        reward: a name of `BUILT_IN`, ``package.module:name`` or ``file.py:name``, with ``verl:`` or ``trl:`` before it
            if it has the signature of those; or the object itself (marked by `verl` or `trl`). It is a `Scorer`, a
            function ``fn(request)``, or a class or an instance with ``compute_score(request)`` and, if it likes,
            ``post_process_scores(list[Score]) -> list``, ``version``, and ``slots`` (calls at once); sync or async. It
            returns a number, a `Score`, or a mapping with ``score``.
        options: keyword arguments of the class, or further ones of the function.
        settings: where a sync reward runs (``isolation``, ``workers``, ``timeout_s``) and the limits of one that has
            its own. A scorer that was loaded with settings keeps them.

    Raises:
        UserError: there is no such reward, it cannot score, or its options do not fit.
    """
    scorer = reward if isinstance(reward, Scorer) else _RewardSpec.of(reward, dict(options or {})).make()
    if settings is not None:
        scorer.configure(settings)
    return scorer


def check_reward(reward: Any, *, options: Mapping[str, Any] | None = None) -> None:
    """Raise `UserError` for what `load_reward` would refuse, as far as it shows without making an instance of a class,
    which may take minutes; and for a key that stands in the options.

    A class may check its options itself, in a classmethod ``check(**options)``.
    """
    spec = _RewardSpec.of(reward, dict(options or {}))
    found = spec.find()
    if not isinstance(found, type):
        spec.make()
        refuse_keys(spec.options, "reward.options")
        return
    check_options(spec.name_of(found), found, spec.options)
    refuse_keys(spec.options, "reward.options")
    check = getattr(found, "check", None)
    if inspect.ismethod(check):
        with named_errors(f"reward {spec.name_of(found)}"):
            check(**spec.options)


def verl(reward: Callable[..., Any] | type) -> Any:
    """Marks an object as one with verl's signature. For a name, the prefix ``verl:`` does the same."""
    return _RewardSpec(reward, "verl")


def trl(reward: Callable[..., Any]) -> Any:
    """Marks an object as one with TRL's signature. For a name, the prefix ``trl:`` does the same."""
    return _RewardSpec(reward, "trl")


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Puts ``name`` before the message of a `UserError` that is raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


@dataclass(frozen=True)
class _RewardSpec:
    """What a scorer is made of, here or in a worker process."""

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

    def find(self) -> Any:
        if not isinstance(self.reward, str) or ":" in self.reward:
            return load_object(self.reward) if isinstance(self.reward, str) else self.reward
        if self.reward not in BUILT_IN:
            known = f"; there are {', '.join(BUILT_IN)}, or give `package.module:name` or `file.py:name`"
            raise UserError(f"no reward {self.reward!r}{nearest(self.reward, BUILT_IN) or known}")
        return load_object(BUILT_IN[self.reward])

    def name_of(self, found: Any) -> str:
        return self.reward if isinstance(self.reward, str) else getattr(found, "__qualname__", type(found).__qualname__)

    def make(self) -> Scorer:
        found = self.find()
        name = self.name_of(found)
        if not (isinstance(found, type) and issubclass(found, Scorer)):
            return _ADAPTERS[self.style](found, name, self)
        check_options(name, found, self.options)
        with named_errors(f"reward {name}"):
            return found(**self.options)


class RewardAdapter(Scorer):
    """A user's function, class or object as a `Scorer`: calls it where it belongs and reads what it returns.

    An async reward runs on the event loop. A sync one runs in threads, or in processes that can be killed
    (``isolation = "process"``), where the adapter is made again from ``spec``.
    """

    arguments = 1
    """Positional arguments of a function before its options."""

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
            raise UserError(f"reward {name} is made already and takes no options; name its class instead")
        if not is_class and method is found:
            check_options(name, found, options, given=self.arguments)
        self.reward, self._spec = found, spec
        self._call = partial(method, **keys) if options and not is_class else method
        self._is_async = inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)
        self._post_process = self._find_post_process()
        self.post_processes = self._post_process is not None
        version = getattr(found, "version", None)
        self.version = version if isinstance(version, str) else _hash_of(type(self), name, options, found)
        slots = getattr(found, "slots", None)
        self.slots = slots if isinstance(slots, int) else None
        if not self._is_async:
            self.slots = RewardSettings().workers
        self._name = name
        self._configured = False
        self._threads: Threads | None = None
        self._processes: Processes | None = None

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
        self.slots = settings.workers
        if settings.isolation == "process":
            self._processes = Processes(self._spec.make, settings.workers, settings.timeout_s)
            self.own_timeout = True
        else:
            self._threads = Threads()

    async def __call__(self, request: Request) -> Score:
        try:
            score = self.read(await self._run(self.score, request))
        except Exception as error:
            raise self._redacted(error) from None
        if self._secrets and score.explanation is not None:
            score = replace(score, explanation=redact(score.explanation, self._secrets))
        return score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        try:
            return self.merge(scores, await self._run(self.post_process, task, scores))
        except Exception as error:
            raise self._redacted(error) from None

    async def aclose(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._processes is not None:
            await self._processes.close()
        close = getattr(self.reward, "aclose", None) or getattr(self.reward, "close", None)
        if close is not None and not isinstance(self.reward, type):
            returned = close()
            if inspect.isawaitable(returned):
                await returned

    async def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        """What ``method`` of this adapter returns, where the reward runs."""
        if not self._configured:
            self.configure(RewardSettings())
        if self._processes is not None:
            return await self._processes.call(method.__name__, *args)
        returned = method(*args) if self._threads is None else await self._threads.call(method, *args)
        return await returned if inspect.isawaitable(returned) else returned

    def _redacted(self, error: Exception) -> Exception:
        """The error without the keys that the reward was given."""
        text = redact(str(error), self._secrets)
        if text == str(error):
            return error
        if isinstance(error, UserError):
            return UserError(text)
        if is_retryable(error):
            return Retryable(text, wait_asked_for(error) or None, cause=cause_of(error))
        return Fatal(text if isinstance(error, Fatal) else f"{type(error).__name__}: {text}", cause=cause_of(error))

    # --- what differs between the signatures ------------------------------------------------------
    def score(self, request: Request) -> Any:
        """What the reward returns for a request, or an awaitable of it."""
        return self._call(request)

    def read(self, returned: Any) -> Score:
        """The score in what the reward returned. Raises `Fatal` if there is none."""
        return as_score(returned)

    def _find_post_process(self) -> Callable[..., Any] | None:
        """The reward's post-processing of a group, called with the task and the scores."""
        own = getattr(self.reward, "post_process_scores", None)
        if own is not None:
            return lambda task, scores: own(list(scores))
        return getattr(self.reward, "finish", None)

    def post_process(self, task: Task, scores: Sequence[Score]) -> Any:
        """What post-processing returns, or an awaitable of it."""
        assert self._post_process is not None
        return self._post_process(task, scores)

    def merge(self, scores: Sequence[Score], returned: Any) -> list[Score]:
        """The group's scores after post-processing."""
        return merge_post_processed(scores, returned)


class VerlAdapter(RewardAdapter):
    """verl's signature: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, which returns a number,
    a mapping, or ``(score, prompt, explanation)``; and ``post_process_scores(list[float]) -> list[float]``."""

    arguments = 4

    def score(self, request: Request) -> Any:
        row = request.task.payload
        try:
            source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        except (KeyError, TypeError):
            raise UserError(
                f"reward verl:{self._name} needs data_source and reward_model.ground_truth in the payload of task "
                f"{request.task.id!r}, which has {', '.join(row) or 'nothing'}"
            ) from None
        _, played = split_at_first_answer(request.messages)
        text = "\n".join(message["content"] or "" for message in played)
        extra = dict(row.get("extra_info") or {})
        return self._call(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)

    def read(self, returned: Any) -> Score:
        if not isinstance(returned, tuple):
            return as_score(returned)
        if len(returned) != 3:
            raise Fatal(f"a tuple of {len(returned)}, not (score, prompt, explanation)", cause="not_a_number")
        return replace(as_score(returned[0]), explanation=shorten(returned[2]))

    def _find_post_process(self) -> Callable[..., Any] | None:
        own = getattr(self.reward, "post_process_scores", None)
        if own is None:
            return None
        return lambda task, scores: own([score.value for score in scores if score.valid])

    def merge(self, scores: Sequence[Score], returned: Any) -> list[Score]:
        left = iter(merge_post_processed([score for score in scores if score.valid], returned))
        return [next(left) if score.valid else score for score in scores]


class TrlAdapter(RewardAdapter):
    """TRL's signature: ``fn(prompts, completions, completion_ids, **columns) -> list[float | None]``.

    It is called with one row. ``completion_ids`` is None; columns are the task's payload. Where that has a ``prompt``
    that is a text, prompt and completion are texts, as in TRL; else they are messages. None means that the reward does
    not apply.
    """

    arguments = -1  # which columns there are depends on the tasks

    def score(self, request: Request) -> Any:
        payload = request.task.payload
        columns = {name: [value] for name, value in payload.items() if name not in _TRL_ARGUMENTS}
        prompt, completion = split_at_first_answer(request.messages)
        if isinstance(payload.get("prompt"), str):
            prompt, completion = payload["prompt"], request.response
        return self._call(prompts=[prompt], completions=[completion], completion_ids=None, **columns)

    def read(self, returned: Any) -> Score:
        try:
            (value,) = returned
        except (TypeError, ValueError):
            raise Fatal(f"{shown(returned)} is not a list of one score", cause="not_a_number") from None
        if value is None:
            raise NotApplicable
        return as_score(value)

    def _find_post_process(self) -> Callable[..., Any] | None:
        return None


_TRL_ARGUMENTS = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
_ADAPTERS: Mapping[str, type[RewardAdapter]] = {"gleanrl": RewardAdapter, "verl": VerlAdapter, "trl": TrlAdapter}


def split_at_first_answer(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages before the first answer of the assistant, and that answer with everything after it."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


def check_options(name: str, target: Callable[..., Any], options: Iterable[str], *, given: int = 0) -> None:
    """Raise `UserError` for the first option that a class or function does not take, or that it needs.

    ``given``: how many of its first parameters are no options; -1: which ones it needs in addition is not known.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)][max(given, 0) :]
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    further = _typed_keywords(target, rest) if rest else []
    if further is not None:
        known = [*(p.name for p in named), *further]
        for option in options:
            if option not in known:
                takes = f"; it takes {', '.join(known)}" if known else "; it takes none"
                raise UserError(f"reward {name} has no option {option!r}{nearest(option, known) or takes}")
    for parameter in named if given >= 0 else ():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"reward {name} needs the option {parameter.name!r}")


def _typed_keywords(target: Callable[..., Any], name: str) -> list[str] | None:
    """The keywords that ``**name`` takes, if a `TypedDict` says so; None if it takes any."""
    try:
        hint = get_type_hints(target.__init__ if isinstance(target, type) else target).get(name)
    except (NameError, TypeError):
        return None
    return list(get_type_hints(get_args(hint)[0])) if get_origin(hint) is Unpack else None


def _hash_of(style: type, name: str, options: Mapping[str, Any], found: Any) -> str:
    """16 hex digits that change with the reward's file and its options."""
    target = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    try:
        source = Path(inspect.getsourcefile(target) or "").read_bytes()
    except (TypeError, OSError):
        source = b""
    text = "\0".join([style.__name__, name, json.dumps(dict(options), sort_keys=True, default=repr)])
    return hashlib.blake2b(text.encode() + source, digest_size=8).hexdigest()
