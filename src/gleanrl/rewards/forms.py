"""How a user writes a reward: a function, a class, or what was written for verl or TRL."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.errors import NotApplicable
from gleanrl.rewards.named import check_options, find
from gleanrl.rewards.placed import InProcesses, InThreads, OnLoop, awaited
from gleanrl.rewards.request import Request, Scorer
from gleanrl.rewards.returned import as_score, finished, shortened, shown
from gleanrl.rewards.workers import Processes, Threads
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable, cause_of, is_retryable
from gleanrl.utils.secrets import redact, refuse_keys, with_keys

log = logging.getLogger(__name__)

Style = Literal["gleanrl", "verl", "trl"]


def load(reward: Any, *, options: Mapping[str, Any] | None = None, settings: RewardSettings | None = None) -> Scorer:
    """A scorer from an object or its name.

    Args:
        reward: one of `gleanrl.rewards.named.BUILT_IN`, ``package.module:name`` or ``file.py:name``, with ``verl:`` or
            ``trl:`` before it where it has the signature of those; or the object itself (marked by `verl` or `trl`).
            It is a function ``fn(request)``, or a class or an instance with ``compute_score(request)`` and, if it
            likes, ``post_process_scores(list[Score]) -> list``; sync or async. It returns a number, a `Score`, or a
            mapping with ``score``.
        options: keyword arguments of the class, or further ones of the function.
        settings: where a sync one runs (``isolation``, ``workers``, ``timeout_s``), and the limits of one that makes
            requests wait itself.

    Raises:
        UserError: there is no such thing, it cannot score, or its options do not fit.
    """
    if isinstance(reward, OnLoop):  # loaded before
        return reward
    spec = _Spec.of(reward, dict(options or {}))
    form = spec()
    if settings is not None and settings.isolation == "process" and form.asynchronous and not form.sets_limits:
        log.warning("reward %s is async and stays on the event loop; isolation = 'process' is for others", form.name)
    return _placed(spec, form, settings)


def of_settings(settings: RewardSettings, reward: Any = None) -> Scorer:
    """`load` of ``reward``, or of what the settings name, with all else as they say."""
    return load(settings.name if reward is None else reward, options=settings.options, settings=settings)


def limited(scorer: Any, settings: RewardSettings) -> Scorer:
    """What `load` made, by other settings; it may not have begun."""
    return _placed(scorer.spec, scorer.form, settings)


def _placed(spec: _Spec, form: Form, settings: RewardSettings | None) -> Scorer:
    limits = settings or RewardSettings()
    if form.asynchronous:
        if settings is not None and form.sets_limits:
            form.made.set_limits(settings)
        return OnLoop(spec, form)
    if limits.isolation == "process":
        return InProcesses(spec, form, Processes(spec, limits.workers, limits.timeout_s), limits.workers)
    return InThreads(spec, form, Threads(limits.workers))


def check(reward: Any, *, options: Mapping[str, Any] | None = None) -> None:
    """What `load` would refuse, as far as it shows without making a class's instance, which may cost minutes; and a key
    that stands in the options.

    A class may know more: its classmethod ``check(**options)`` is called, where it has one. Raises `UserError`.
    """
    spec = _Spec.of(reward, dict(options or {}))
    found = spec.found()
    if not isinstance(found, type):
        spec()
        refuse_keys(spec.options, "reward.options")
        return
    check_options(spec.name_of(found), found, spec.options)
    refuse_keys(spec.options, "reward.options")
    own = getattr(found, "check", None)
    if inspect.ismethod(own):
        with named_mistakes(spec.name_of(found)):
            own(**spec.options)


@contextmanager
def named_mistakes(name: str) -> Iterator[None]:
    """A `UserError` inside says of which reward it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"reward {name}: {error}") from None


def verl(reward: Callable[..., Any] | type) -> Any:
    """Marks an object that has verl's signature, for `load`; the prefix ``verl:`` does it for a name."""
    return _Spec(reward, "verl")


def trl(reward: Callable[..., Any]) -> Any:
    """Marks an object that has TRL's signature, for `load`; the prefix ``trl:`` does it for a name."""
    return _Spec(reward, "trl")


@dataclass(frozen=True)
class _Spec:
    """What to make a `Form` of, here or in another process."""

    reward: Any
    style: Style = "gleanrl"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reward: Any, options: Mapping[str, Any]) -> _Spec:
        if isinstance(reward, _Spec):
            return replace(reward, options=options)
        if isinstance(reward, str):
            prefix, _, rest = reward.partition(":")
            if prefix in ("verl", "trl") and ":" in rest:
                return cls(rest, "verl" if prefix == "verl" else "trl", options)
        return cls(reward, "gleanrl", options)

    def found(self) -> Any:
        return find(self.reward) if isinstance(self.reward, str) else self.reward

    def name_of(self, found: Any) -> str:
        return self.reward if isinstance(self.reward, str) else getattr(found, "__qualname__", type(found).__qualname__)

    def __call__(self) -> Form:
        found = self.found()
        return _FORMS[self.style](found, self.name_of(found), self.options)


# --- what scores ----------------------------------------------------------------------------------
class Form:
    """A reward in the house's own form: called with a `Request`, and with the scores of a complete group."""

    arguments = 1  # that a function gets, before its options

    def __init__(self, found: Any, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self._options = options
        given, self.secrets = (options, []) if getattr(found, "reads_env", False) else with_keys(options)
        made = isinstance(found, type)
        if made:
            check_options(name, found, options)
            try:
                with named_mistakes(name):
                    found = found(**given)
            except TypeError as error:
                raise UserError(f"reward {name}: {error}") from None
        self.made = found
        method = getattr(found, "compute_score", found)
        if not callable(method):
            raise UserError(f"reward {name} is {type(found).__name__}: neither a function nor has it compute_score")
        if not made and method is not found and options:
            raise UserError(f"reward {name} is made already and takes no options; name its class instead")
        if not made and method is found:
            check_options(name, found, options, given=self.arguments)
        self._call = partial(method, **given) if options and not made else method

    @cached_property
    def asynchronous(self) -> bool:
        method = self._call.func if isinstance(self._call, partial) else self._call
        return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)

    @cached_property
    def version(self) -> str:
        """The reward's own ``version``, or a hash of its file and its options."""
        own = getattr(self.made, "version", None)
        if isinstance(own, str):
            return own
        options = json.dumps(dict(self._options), sort_keys=True, default=repr)
        text = "\0".join([type(self).__name__, self.name, options]).encode() + _source(self.made)
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def sets_limits(self) -> bool:
        """Whether it makes requests wait itself, and is told of the limits."""
        return hasattr(self.made, "set_limits")

    @property
    def finishes(self) -> bool:
        return self._finisher is not None

    def score(self, request: Request) -> Any:
        """What the reward returned, or the awaitable of it."""
        return self._call(request)

    def read(self, returned: Any) -> Score:
        """The score in it. Raises `Fatal` if there is none."""
        return as_score(returned)

    def said(self, score: Score) -> Score:
        """The score, its explanation without the keys that the reward was given."""
        if not self.secrets or score.explanation is None:
            return score
        return replace(score, explanation=redact(score.explanation, self.secrets))

    def told(self, error: Exception) -> Exception:
        """The error, without the keys that the reward was given."""
        if not self.secrets or (text := redact(str(error), self.secrets)) == str(error):
            return error
        if isinstance(error, UserError):
            return UserError(text)
        if is_retryable(error):
            return Retryable(text, getattr(error, "after_s", None), cause=cause_of(error))
        return Fatal(text if isinstance(error, Fatal) else f"{type(error).__name__}: {text}", cause=cause_of(error))

    def finish(self, task: Task, scores: Sequence[Score]) -> Any:
        """What post-processing returned, or the awaitable of it."""
        own = getattr(self.made, "post_process_scores", None)
        return own(list(scores)) if own is not None else self.made.finish(task, scores)

    def merged(self, scores: Sequence[Score], returned: Any) -> list[Score]:
        """The group's scores by what post-processing returned."""
        return finished(scores, returned)

    async def aclose(self) -> None:
        close = getattr(self.made, "aclose", None) or getattr(self.made, "close", None)
        if close is not None and not isinstance(self.made, type):
            await awaited(close())

    @property
    def _finisher(self) -> Any:
        return getattr(self.made, "post_process_scores", None) or getattr(self.made, "finish", None)


class _VerlForm(Form):
    """``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict | (score, prompt,
    explanation)``, and ``post_process_scores(list[float]) -> list[float]`` of a class."""

    arguments = 4

    def score(self, request: Request) -> Any:
        row = request.task.payload
        try:
            source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        except (KeyError, TypeError):
            raise UserError(
                f"reward verl:{self.name} needs data_source and reward_model.ground_truth in the payload of task "
                f"{request.task.id!r}, which has {', '.join(row) or 'nothing'}"
            ) from None
        extra = dict(row.get("extra_info") or {})
        _, played = opening_and_rest(request.messages)
        text = "\n".join(message["content"] or "" for message in played)
        return self._call(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)

    def read(self, returned: Any) -> Score:
        if not isinstance(returned, tuple):
            return as_score(returned)
        if len(returned) != 3:
            raise Fatal(f"a tuple of {len(returned)}, not (score, prompt, explanation)", cause="not_a_number")
        return replace(as_score(returned[0]), explanation=shortened(returned[2]))

    def finish(self, task: Task, scores: Sequence[Score]) -> Any:
        return self.made.post_process_scores([score.value for score in scores if score.valid])

    def merged(self, scores: Sequence[Score], returned: Any) -> list[Score]:
        left = iter(finished([score for score in scores if score.valid], returned))
        return [next(left) if score.valid else score for score in scores]

    @property
    def _finisher(self) -> Any:
        return getattr(self.made, "post_process_scores", None)


class _TrlForm(Form):
    """``fn(prompts, completions, completion_ids, **columns) -> list[float | None]``, called with one row;
    ``completion_ids`` is None, and columns are the task's payload. Where that has a ``prompt`` that is a text, prompt
    and completion are texts, as TRL has them for such a data set; else they are messages."""

    arguments = -1  # which columns there are is the tasks' business

    def score(self, request: Request) -> Any:
        opening, played = opening_and_rest(request.messages)
        columns = {name: [value] for name, value in request.task.payload.items() if name not in _TRL_OWN}
        prompt: Any = request.task.payload.get("prompt")
        if isinstance(prompt, str):
            return self._call(prompts=[prompt], completions=[request.response], completion_ids=None, **columns)
        return self._call(prompts=[opening], completions=[played], completion_ids=None, **columns)

    def read(self, returned: Any) -> Score:
        try:
            (value,) = returned
        except (TypeError, ValueError):
            raise Fatal(f"{shown(returned)} is not a list of one score", cause="not_a_number") from None
        if value is None:
            raise NotApplicable
        return as_score(value)

    @property
    def _finisher(self) -> Any:
        return None


_TRL_OWN = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
_FORMS: Mapping[str, type[Form]] = {"gleanrl": Form, "verl": _VerlForm, "trl": _TrlForm}


def opening_and_rest(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What stood before the first answer, and the answer with all that followed."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


def _source(found: Any) -> bytes:
    """The file that it is written in, where there is one."""
    what = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    try:
        return Path(inspect.getsourcefile(what) or "").read_bytes()
    except (TypeError, OSError):
        return b""
