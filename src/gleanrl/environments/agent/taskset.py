"""The environment ``agent``: trains the model in an agent that owns its loop, such as a function or a program.

The agent gets a task and the address of an endpoint (`gleanrl.environments.agent.endpoint`), to which it sends its
model calls with any client of OpenAI's or Anthropic's API. Each episode runs in a process of its own, which is killed
at the end of the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import pydantic
from pydantic import Field

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentRaised
from gleanrl.protocols import Environment, ModelAddress, Observation, Split, Taskset, Tools
from gleanrl.rollout.expert import opening_of
from gleanrl.types import Message, Score, StopReason, Task, as_float
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.processes import RemoteError, Served, WorkerDied, WorkerProcess, pack

ARGUMENTS = ("task", "base_url", "api_key", "model")
"""Names of the arguments with which an agent function is called."""
_TAIL = 1 << 16  # number of bytes at the end of a command's output that are kept
_REST_S = 1.0  # seconds for which the end of each output of a command is read after the command has ended
_MAX_VARIABLE = 100_000  # bytes of the longest text that is passed in an environment variable; Linux allows 128 KiB
Result = tuple[Score | None, str | None]  # the score and the answer of an agent


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class AgentTaskset(Taskset):
    """Lets an agent of yours solve tasks. The agent calls the model over HTTP, and knows nothing of the training.

    Exactly one of ``agent`` and ``command`` is set.
    """

    agents = True

    agent: str | None = None
    """A function, sync or async, as ``file.py:name`` or ``package.module:name``. It is called with the keyword
    arguments ``task`` (a dict), ``base_url``, ``api_key`` and ``model``. It returns a number, which is the score; a
    text, which ``reward.name`` reads as the last message of the conversation; a dict with ``score``, ``answer`` (such a
    text) or both, whose further numbers become parts of the score; or None."""
    command: str | list[str] | None = None
    """A program and its arguments. It gets the task as JSON on its standard input and, up to 100 kB, in the environment
    variable ``GLEANRL_TASK``. It gets the address in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``,
    ``ANTHROPIC_API_KEY`` and ``GLEANRL_MODEL``. The last line that it prints is the answer and, if it is a number, also
    the score. Any exit status but 0 is a failure."""
    tasks_from: str | list[str] | dict[str, Any] = Field(alias="tasks")
    """The tasks: files as in the option ``path`` of the environment ``dataset``, or the ``name`` and the ``options`` of
    any environment."""
    expert: str | None = None
    """A function, as ``file.py:name``, that answers the agent's model calls in the demonstrations of a warm start. It
    is called with the task (a dict), the messages and the tools of a call; what it may return is described at
    `Taskset.agent_expert`. None = the assistant's messages in the demonstrations of ``tasks``, one for each call."""
    seed: int = 0
    """Seed of the environment that ``tasks`` names, unless its options contain one; by default that of the run."""
    limit_score: float | None = 0.0
    """Score of an episode whose agent fails after its model call was refused because of ``context.max_turns`` or a full
    context; None = such an episode has no score of its own."""

    def __post_init__(self) -> None:
        if (self.agent is None) == (self.command is None):
            raise ValueError("set one of environment.options.agent and environment.options.command")
        if self.agent is not None:
            _ = self._preload
        if self.command is not None:
            _words(self.command)
        if self.expert is not None:
            load_object(self.expert)
        _ = self._source

    @cached_property
    def _source(self) -> Taskset:
        given = self.tasks_from
        if not isinstance(given, dict):
            given = {"name": "dataset", "options": {"path": given}}
        if odd := sorted(given.keys() - {"name", "options"}):
            raise UserError(f"environment.options.tasks.{odd[0]}: a table has name and options only")
        return load_taskset(EnvironmentSettings(**given), seed=self.seed)

    @cached_property
    def _preload(self) -> list[str]:
        """The modules that the agent function needs, which the processes of agents import in advance."""
        function = load_object(str(self.agent))
        if not callable(function):
            raise UserError(f"environment.options.agent = {self.agent!r}: a {type(function).__name__} cannot be called")
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            raise UserError(
                f"environment.options.agent = {self.agent!r} is called with {', '.join(ARGUMENTS)}: {error}"
            ) from None
        # The modules of what its file imports. Which of them this process had imported before does not matter.
        used = vars(sys.modules[function.__module__]).values() if hasattr(function, "__module__") else ()
        names = {value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) for value in used}
        return [__name__, *sorted(name for name in names if name in sys.modules and "gleanrl_file_" not in name)]

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.version

    @property
    def phrases(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.phrases

    @property
    def weights(self) -> Mapping[str, float]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.weights

    @property
    def has_expert(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.expert is not None or self._source.has_expert

    @property
    def splits_apart(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.splits_apart

    @property
    def named_by_content(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.named_by_content

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return self._source.tasks(split, count)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        return self._source.demonstrate(task, seed=seed, noise=noise)

    def agent_expert(self, task: Task, *, seed: int, noise: float = 0.0) -> Callable[[Sequence[Message], Tools], Any]:
        if self.expert is not None:
            return partial(load_object(self.expert), _as_dict(task))
        said, _ = self._source.demonstrate(task, seed=seed, noise=noise)
        answers = [message for message in said[opening_of(task, said) :] if message["role"] == "assistant"]

        def answer(messages: Sequence[Message], tools: Tools) -> Message:
            if not answers:
                raise NoExpert(
                    f"the demonstration of task {task.id!r} has fewer answers than the agent has calls; set "
                    "environment.options.expert to a function that answers them"
                )
            return answers.pop(0)

        return answer

    def environment(self, task: Task) -> Environment:
        return _Episode(self, task)

    async def play(self, task: Task, model: ModelAddress) -> Result:
        """Run the agent on a task, and return its score and its answer.

        Raises:
            EnvironmentRaised: the agent failed or its process died.
        """
        if self.command is None:
            make: Callable[[], Served] = partial(_Function, str(self.agent))
            multiprocessing.get_context("forkserver").set_forkserver_preload(self._preload)
        else:
            make = partial(_Command, _words(self.command), os.getcwd(), dict(os.environ))
            multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        # The process has no time limit of its own: `EnvironmentPool` cancels this method if the agent takes too long.
        worker = WorkerProcess(pack(make, raises=(EnvironmentRaised,)), timeout_s=1e9, forked=True)
        try:
            return await worker.call("solve", _as_dict(task), model, label=f"task {task.id!r}")
        except RemoteError as error:
            raise EnvironmentRaised(task.id, error.kind, error.detail, error.traceback_text) from None
        except WorkerDied as error:
            raise EnvironmentRaised(task.id, "AgentDied", str(error), "") from None
        finally:
            worker.kill("the episode has ended")
            await worker.close()


def _as_dict(task: Task) -> dict[str, Any]:
    """Return the task in the form in which agents and experts get it.

    Its prompt is a text if the row's is one and the model sees no other message; otherwise it is a list of messages.
    """
    prompt: Any = list(task.prompt) or task.payload.get("prompt", [])
    if isinstance(task.payload.get("prompt"), str) and [message["role"] for message in task.prompt] == ["user"]:
        prompt = task.prompt[0]["content"]
    return {**task.payload, "prompt": prompt, "id": task.id}


class _Episode(Environment):
    def __init__(self, taskset: AgentTaskset, task: Task) -> None:
        self._taskset, self._task = taskset, task

    async def reset(self) -> Observation:
        return Observation((), agent=True)

    async def step(self, message: Message) -> Observation:
        raise RuntimeError("an agent makes its model calls itself; its environment has no steps")

    async def run(self, model: ModelAddress) -> Observation:
        score, answer = await self._taskset.play(self._task, model)
        messages = () if answer is None else (Message(role="assistant", content=answer),)
        return Observation(messages, done=True, score=score)

    async def conclude(self, stop: StopReason) -> Score | None:
        return None if self._taskset.limit_score is None else Score(self._taskset.limit_score)


class _Function(Served):
    """Holds an agent function in the process of an episode."""

    def __init__(self, path: str) -> None:
        self._function = load_object(path)

    async def solve(self, task: Mapping[str, Any], model: ModelAddress) -> Result:
        values = (dict(task), f"{model.url}/v1", model.key, model.name)
        arguments: dict[str, Any] = dict(zip(ARGUMENTS, values, strict=True))
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**arguments)
        else:  # in a thread of its own, because the function may call `asyncio.run`
            result = await asyncio.to_thread(self._call, arguments)
        if inspect.isawaitable(result):
            result = await result
        if result is None or isinstance(result, str):
            return None, result
        if not isinstance(result, Mapping):
            return Score(result), None
        if result and not {"answer", "score"} & result.keys():
            raise ValueError(
                f"the agent returned a dict with neither 'score' nor 'answer', but {', '.join(map(str, result))}"
            )
        answer, value = result.get("answer"), result.get("score")
        if value is None:
            return None, None if answer is None else str(answer)
        parts = {name: part for name, part in result.items() if name not in ("answer", "score")}
        return Score(value, parts=parts), None if answer is None else str(answer)

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self._function(**arguments)
        except StopIteration as error:  # asyncio cannot hand it on from a thread
            raise RuntimeError("the agent raised StopIteration") from error


def _words(command: str | list[str]) -> list[str]:
    """Return the program and the arguments of a command. Raises `UserError` if there is no such program."""
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise UserError(f"environment.options.command = {command!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"environment.options.command = {command!r}: there is no such program")
    return words


class _Command(Served):
    """Runs a command as an agent, in the process of an episode; see `AgentTaskset.command`.

    The command is in the process group of this process, so that it ends with it, even if the run is killed.
    """

    def __init__(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        self._words, self._folder, self._environment = words, folder, environment

    def solve(self, task: Mapping[str, Any], model: ModelAddress) -> Result:
        text = json.dumps(task, ensure_ascii=False)
        variables = {
            "OPENAI_BASE_URL": f"{model.url}/v1",
            "OPENAI_API_KEY": model.key,
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_API_KEY": model.key,
            "GLEANRL_MODEL": model.name,
            **({"GLEANRL_TASK": text} if len(text.encode()) <= _MAX_VARIABLE else {}),
        }
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker ignores it, and the command would inherit that
        with tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            process = subprocess.Popen(
                self._words,
                bufsize=0,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env={**self._environment, **variables},
            )
        outputs = bytearray(), bytearray()
        streams = zip((process.stdout, process.stderr), outputs, strict=True)
        readers = [threading.Thread(target=_read_tail, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        status = process.wait()
        for reader in readers:
            reader.join(_REST_S)  # processes that the command has left running may keep the pipes open
        printed, complained = (bytes(output).decode("utf-8", "replace") for output in outputs)
        if status != 0:
            last = complained.strip().splitlines()[-1:] or printed.strip().splitlines()[-1:]
            ended = f"the command ended with status {status}"
            raise EnvironmentRaised(str(task["id"]), ended, "".join(last), complained)
        lines = printed.strip().splitlines()
        if not lines:
            return None, None
        try:
            number = json.loads(lines[-1])
        except (ValueError, RecursionError):
            number = None
        value = None if isinstance(number, bool) else as_float(number)
        return None if value is None or not math.isfinite(value) else Score(value), lines[-1].strip()


def _read_tail(stream: Any, output: bytearray) -> None:
    """Read a stream to its end, and keep its last `_TAIL` bytes in ``output``."""
    while piece := stream.read(_TAIL):
        output += piece
        del output[:-_TAIL]
