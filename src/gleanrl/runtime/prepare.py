"""Prepares a run: makes its tasks, records the expert's demonstrations, loads the model, and performs the warm start.

The demonstrations and the warm-started model are cached on disk. The cache key is a hash of everything that the result
depends on (settings, seed, versions), so a second run with the same settings starts at once, and a run with other
settings computes them again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import gleanrl
from gleanrl.algorithms.advantages import ESTIMATORS
from gleanrl.algorithms.batch import observed_mask
from gleanrl.config.settings import Config, EnvironmentSettings, TaskSettings
from gleanrl.config.validate import check_agents
from gleanrl.curriculum.orders import make_curriculum
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentFailure, EnvironmentPool
from gleanrl.learners.distributed.sharded import check_layout
from gleanrl.learners.models import add_adapters, compute_dtype, empty_model, load_model, load_tokenizer, resolve_device
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import texts_of
from gleanrl.protocols import Curriculum, Split, Taskset
from gleanrl.rollout.expert import Called, opening_of, play_expert, record
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.memory import check_memory
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import BoolArray, IntArray, Message, Score, Segment, Task, check_messages, segment_arrays
from gleanrl.utils import atomic, background_loop
from gleanrl.utils.cache import cache_dir, one_at_a_time
from gleanrl.utils.errors import NoExpert, UserError, defined_at, describe, raised_at
from gleanrl.utils.importing import file_versions
from gleanrl.utils.products import bfloat16_is_slow
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

_AT_ONCE = 8  # number of agents that play demonstrations at the same time
_FEW = 8  # number of tasks of each split that a dry run makes, because making all of them may take long


@dataclass(frozen=True)
class Demonstration:
    """An episode that the expert has played."""

    conversations: tuple[Called, ...]
    """The conversation in which the expert acts as the model, and the definitions of the tools that it could call. If
    the environment has an agent that calls the model itself: the model calls, each with the expert's answer."""
    agent: bool = False
    """Whether the environment has such an agent."""
    opening: int = 0
    """Number of messages at the start of the conversation that are the task's prompt and are not trained on."""

    def segments(self, renderer: Renderer, system: Sequence[Message] = ()) -> Sequence[Segment]:
        """Return the tokens of the episode. ``system`` are messages that come before all that an environment says."""
        if self.agent:
            return record(renderer, self.conversations).segments()
        ((messages, tools),) = self.conversations
        return [renderer.with_tools(tools).demonstration([*system, *messages], len(system) + self.opening)]

    def texts(self) -> list[str]:
        """Return the texts of the episode, each message once, for the tokenizer of a tiny model."""
        texts: list[str] = []
        for messages, tools in self.conversations:
            texts += [text for text in texts_of(messages, tools) if not self.agent or text not in texts]
        return texts


@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes: the tasks, demonstrations, model and tokenizer that a run starts from."""

    taskset: Taskset
    train: Sequence[Task]
    evaluation: Sequence[Task]
    demonstrations: Sequence[Demonstration]
    model: Any  # a transformers causal LM
    tokenizer: Any

    def order(
        self, settings: TaskSettings, *, group: int, seed: int, greedy: bool, success_threshold: float
    ) -> Curriculum:
        """Return the curriculum that ``settings`` selects, which decides the order of the training tasks.

        See `make_curriculum` for the arguments. Raises `UserError` if ``settings`` are wrong.
        """
        return make_curriculum(
            settings,
            self.train,
            self.taskset.weights,
            group=group,
            seed=seed,
            greedy=greedy,
            success_threshold=success_threshold,
        )


def prepare(
    config: Config,
    progress: Progress,
    *,
    trains: bool = True,
    mapped: bool = False,
    restored: bool = False,
    ranks: int = 1,
) -> Prepared:
    """Make the tasks, the demonstrations and the model of a run, or load them from the cache.

    Args:
        trains: whether the run trains, which needs more memory than an evaluation.
        mapped: leave the model's weights in their files, see `load_model`. A warm start trains them, and so reads them.
        restored: whether a checkpoint will be loaded. It has all weights, unless the run trains adapters, so that the
            warm start is left out.
        ranks: number of processes of the learner.

    Raises:
        UserError: the environment or the model cannot be made, an option is wrong, the splits share tasks, or the model
            needs more memory than there is.
    """
    torch.manual_seed(derive(config.run.seed, "torch"))
    check_model(config, progress, trains=trains, ranks=ranks)
    taskset, train, evaluation = make_tasks(config, progress)
    # The result is not used. The call raises `UserError` for wrong options now, before the costly steps below.
    make_curriculum(config.tasks, train, taskset.weights, group=1, seed=0, greedy=False)
    if type(taskset).prepare is not Taskset.prepare:
        with progress.stage("preparing tasks", len(train) + len(evaluation)) as stage:
            taskset.prepare([*train, *evaluation], workers=os.cpu_count() or 1, progress=lambda *_: stage.advance())
    demonstrations = demonstrate(config, taskset, progress) if needs_expert(config, restored=restored) else ()
    texts = [text for shown in demonstrations for text in shown.texts()]
    # Demonstrations contain neither the system prompt nor some of the environment's messages, such as error messages.
    # These texts are added once per demonstration, so that they have a comparable weight in the vocabulary.
    unsaid = [*taskset.phrases, *filter(None, [config.context.system_prompt])]
    texts += unsaid * len(demonstrations)
    warms = needs_warm_start(config, restored=restored)
    mapped = mapped and not warms
    model, tokenizer = load_model(config.model, texts=texts, seed=derive(config.run.seed, "model"), mapped=mapped)
    if warms:
        model = warm_start(config, model, tokenizer, demonstrations, progress)
    return Prepared(taskset, train, evaluation, demonstrations, model, tokenizer)


def prepare_model(config: Config, progress: Progress, *, restored: bool) -> Prepared:
    """Make the model of a run for a command that plays no episodes.

    The tasks are made only if the model depends on demonstrations. See `prepare` for ``restored`` and the errors.
    """
    if needs_expert(config, restored=restored):
        return prepare(config, progress, trains=False, restored=restored)
    return Prepared(None, (), (), (), *load_model(config.model))  # type: ignore[arg-type]  # no tasks are played


def check_parts(config: Config, progress: Progress) -> None:
    """Make what is fast to make, for a dry run: the taskset, `_FEW` tasks of each split, and the tokenizer.

    Raises:
        UserError: the environment, its tasks, the model or the source of the replay pool cannot be used, or the model
            needs more memory than there is.
    """
    counts = [f"{split}_tasks" for split in ("train", "eval", "warm_start")]
    few = config.environment.model_copy(update={name: min(getattr(config.environment, name), _FEW) for name in counts})
    taskset, _, _ = make_tasks(config.model_copy(update={"environment": few}), progress)
    if needs_expert(config):
        take_tasks(taskset, few, "warm_start")
    resolve_device(config.model.device)
    check_model(config, progress, ranks=config.learner.ranks)
    source = config.replay.seed_from if config.replay.enabled else None
    if source is not None and not Path(source).exists():
        raise UserError(f"replay.seed_from = {source!r}: no such file or folder")


def check_model(config: Config, progress: Progress, *, trains: bool = True, ranks: int = 1) -> None:
    """Check a given model's tokenizer and chat template, and the memory that it needs, before costly steps begin.

    Of any model it is checked whether ``ranks`` processes can train it, and whether it can have the run's adapters.

    Raises:
        UserError: the model cannot be used, its chat template lacks one of ``context.template_options``, or it needs
            more memory than there is.
    """
    on_cpu = not config.ray.enabled and resolve_device(config.model.device).type == "cpu"
    if on_cpu and config.model.dtype == "bfloat16" and bfloat16_is_slow():
        progress.print(
            "this processor has no instructions for bfloat16, so everything takes many times as long as with "
            "model.dtype = 'float32'"
        )
    if trains and ranks > 1:
        # On Ray, the learner may have another device than this process.
        device = torch.device("meta") if config.ray.enabled else resolve_device(config.model.device)
        half = config.model.dtype == "bfloat16" and device.type == "cpu"
        has_critic = "values" in ESTIMATORS.get(config.credit.estimator).needs
        check_layout(empty_model(config.model), config.learner, ranks, has_critic=has_critic, half_on_cpu=half)
    if trains and config.learner.lora_rank:
        add_adapters(empty_model(config.model), config.learner, seed=0)
    if config.model.init == "tiny":
        return
    _, tokenizer = load_tokenizer(config.model)
    Renderer(tokenizer, template_options=config.context.template_options)
    if ranks == 1:  # torchrun starts several, where ``learner.ranks`` is 1
        check_memory(config, progress, trains=trains)


def needs_expert(config: Config, *, restored: bool = False) -> bool:
    """Return whether the run needs demonstrations, for its warm start or for the text of the tiny model's tokenizer."""
    return needs_warm_start(config, restored=restored) or config.model.init == "tiny"


def needs_warm_start(config: Config, *, restored: bool) -> bool:
    """Return whether the run needs the weights of its warm start. ``restored``: a checkpoint will be loaded."""
    return config.warm_start.enabled and (not restored or config.learner.lora_rank > 0)


def make_tasks(config: Config, progress: Progress) -> tuple[Taskset, Sequence[Task], Sequence[Task]]:
    """Make the taskset of a run, its training tasks and its evaluation tasks.

    Raises:
        UserError: the environment cannot be made, has no score or no expert although the run needs them, its tasks are
            wrong, or the splits share tasks.
    """
    settings = config.environment
    taskset = load_taskset(settings, config.run.seed)
    if taskset.needs_reward and config.reward.name == "environment":
        raise UserError(f"environment {settings.name!r} scores nothing itself: set reward.name (e.g. math)")
    if taskset.agents:
        check_agents(config)
    with progress.stage("making tasks", settings.train_tasks + settings.eval_tasks) as stage:
        train = take_tasks(taskset, settings, "train")
        stage.advance(settings.train_tasks)
        evaluation = take_tasks(taskset, settings, "eval")
        stage.advance(settings.eval_tasks)
    held = set() if taskset.splits_apart else {task.id for task in evaluation}
    if shared := [task.id for task in train if task.id in held]:
        raise UserError(
            f"training and evaluation share {len(shared)} of {len(held)} evaluation tasks ({shared[0]!r} is one); "
            "`tasks` of the environment must give each split problems, and ids, of its own"
        )
    if needs_expert(config) and not taskset.has_expert:
        raise UserError(
            f"environment {settings.name!r} has no expert to demonstrate (`has_expert` is false); set "
            "warm_start.enabled = false and model.init to a model that knows the task"
        )
    return taskset, train, evaluation


def demonstrate(config: Config, taskset: Taskset, progress: Progress) -> Sequence[Demonstration]:
    """Return at most ``warm_start.demonstrations`` successful demonstrations of the tasks in the split "warm_start".

    The result is cached on disk.

    Raises:
        UserError: the expert solved none of the tasks.
    """
    settings = config.warm_start
    key = fingerprint(
        "demonstrations, openings", gleanrl.__version__,
        config.environment.model_dump(exclude={"workers", "timeout_s"}),
        config.run.seed, settings.demonstrations, settings.noise, *filter(None, [taskset.version]),
        *file_versions([config.environment.name, config.environment.options]),
    )  # fmt: skip
    path = cache_dir("demonstrations") / f"{key}.json"
    if path.exists():
        try:
            return [
                Demonstration(
                    tuple((tuple(messages), tuple(tools)) for messages, tools in conversations), agent, opening
                )
                for conversations, agent, opening in json.loads(path.read_text())
            ]
        except (ValueError, TypeError):  # the cached file is damaged, so the demonstrations are recorded again
            path.unlink(missing_ok=True)
    tasks = take_tasks(taskset, config.environment, "warm_start")
    kept: list[Demonstration] = []
    failure: Exception | None = None
    failures = 0  # number of attempts that an error has ended
    pool = EnvironmentPool(taskset, timeout_s=config.environment.timeout_s)

    async def together(playing: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        return await asyncio.gather(*playing, return_exceptions=True)

    try:
        with progress.stage("demonstrations", settings.demonstrations) as stage:
            attempts = iter(range(3 * settings.demonstrations))
            while batch := [*islice(attempts, min(settings.demonstrations - len(kept), _AT_ONCE))]:
                played: list[tuple[Demonstration, Any]] = []
                agents = []
                for attempt in batch:
                    task = tasks[attempt % len(tasks)]
                    seed = derive(config.run.seed, "demonstration", attempt)
                    try:
                        expert = taskset.agent_expert(task, seed=seed, noise=settings.noise)
                        if expert is None:
                            messages, given = taskset.demonstrate(task, seed=seed, noise=settings.noise)
                            conversation = (messages, tuple(taskset.tools(task)))
                            opening = opening_of(task, messages)
                            played.append((Demonstration((conversation,), opening=opening), given))
                        else:
                            agents.append(play_expert(pool.environment(task), pool.endpoint.open, expert))
                    except NoExpert as error:
                        # In a mixture of environments, tasks of another environment may still have an expert.
                        failure, failures = error, failures + 1
                for result in background_loop.run(together(agents)) if agents else ():
                    if isinstance(result, NoExpert | EnvironmentFailure):
                        failure, failures = result, failures + 1
                    elif isinstance(result, BaseException):
                        raise UserError(
                            f"environment.options.expert: {describe(result)}{raised_at(result)}"
                        ) from result
                    else:
                        # The score of an agent that gives none is up to the run's reward. Its expert is trusted.
                        calls, given = result
                        played.append((Demonstration(tuple(calls), agent=True), Score(1.0) if given is None else given))
                for shown, given in played:
                    said = any(
                        message["role"] == "assistant"
                        for messages, _ in shown.conversations
                        for message in messages[shown.opening :]
                    )
                    score = Score.of(given)
                    if score.valid and score.value > 0 and said:
                        kept.append(shown)
                        stage.advance()
                if isinstance(failure, EnvironmentFailure) and not kept:
                    break  # the agent fails whatever the task
                if failures == batch[-1] + 1 >= len(tasks):
                    break  # each task has failed
    finally:
        background_loop.run(pool.close())
    if not kept:
        if isinstance(failure, UserError):
            raise failure
        none = f"the expert of environment {config.environment.name!r} solved none of {len(tasks)} tasks"
        raise UserError(none if failure is None else f"{none} ({failure})")
    atomic.write_text(path, json.dumps([(shown.conversations, shown.agent, shown.opening) for shown in kept]))
    return kept


def warm_start(
    config: Config, model: Any, tokenizer: Any, demonstrations: Sequence[Demonstration], progress: Progress
) -> Any:
    """Fine-tune the model on the demonstrations and return it. The weights are cached on disk.

    If another process makes the same warm start, this one waits and takes its result. The returned object may be
    another one than ``model``, if it is loaded from the cache.
    """
    settings, weights = config.warm_start, hashlib.blake2b(digest_size=16)
    # A path or a name does not determine the weights, because a directory may be written again.
    for parameter in model.parameters():
        weights.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    key = fingerprint(
        "warm start, spoken", weights.hexdigest(), gleanrl.__version__, torch.__version__,
        config.model.model_dump(exclude={"device"}),
        model.config.to_dict(), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template,
        settings.model_dump(), config.run.seed, config.context.system_prompt,
        [(shown.conversations, shown.agent, shown.opening) for shown in demonstrations],
        *filter(None, [config.context.template_options]),
    )  # fmt: skip
    folder = cache_dir("warm-start") / key
    device, dtype = model.device, model.dtype
    with one_at_a_time(folder, lambda: progress.print("another process makes the same warm start; waiting for it")):
        if (folder / "config.json").exists():
            try:
                return type(model).from_pretrained(folder, dtype=dtype).to(device)
            except (OSError, ValueError, RuntimeError, SafetensorError):  # it is damaged, so train it again
                shutil.rmtree(folder, ignore_errors=True)
        examples = supervised_examples(config, tokenizer, demonstrations)
        pairs = [(tokens, mask) for tokens, mask, _ in examples]
        with progress.stage("warm start", settings.steps) as stage:
            fine_tune(
                model,
                pairs,
                observed=[observed for _, _, observed in examples],
                observation_coefficient=settings.observation_coefficient,
                steps=settings.steps,
                batch=settings.batch,
                lr=settings.lr,
                seed=derive(config.run.seed, "warm start"),
                progress=lambda step, total, loss: stage.advance(1, loss=loss),
                compute_dtype=compute_dtype(config.model, model.device),
            )
        with atomic.directory(folder) as partial:
            save_model(partial, model, tokenizer)
    return model


def supervised_examples(
    config: Config, tokenizer: Any, demonstrations: Sequence[Demonstration]
) -> list[tuple[IntArray, BoolArray, BoolArray]]:
    """Tokenise each demonstration as an episode of the agent, and return its token ids and two masks.

    All have shape [tokens]. The first mask is True at tokens of the agent's messages, the second at those of the
    environment's answers. Demonstrations longer than
    ``model.max_context`` are truncated.
    """
    bodies = config.warm_start.observation_coefficient > 0
    renderer = Renderer(tokenizer, template_options=config.context.template_options, bodies=bodies)
    system = [Message(role="system", content=config.context.system_prompt)] if config.context.system_prompt else []
    examples = []
    for shown in demonstrations:
        for segment in shown.segments(renderer, system):
            tokens, mask, _ = segment_arrays(segment)
            limit = config.model.max_context
            examples.append((tokens[:limit], mask[:limit], observed_mask(segment)[:limit]))
    return examples


def fingerprint(*parts: Any) -> str:
    """Return a hash of ``parts`` (24 hexadecimal digits). Values that JSON cannot represent enter as ``str(value)``."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save the model and its tokenizer to ``folder``, in the format that transformers and vLLM load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def take_tasks(taskset: Taskset, settings: EnvironmentSettings, split: Split) -> Sequence[Task]:
    """Return the tasks of ``split``, as many as ``settings`` ask for.

    Raises:
        UserError: the taskset returns anything else than a sequence of tasks, has fewer of them, or gives two of them
            the same id, or one of them an id that is no text or a prompt whose messages are no texts.
    """
    count = getattr(settings, f"{split}_tasks")
    tasks = taskset.tasks(split, count)
    call, place = f"{type(taskset).__name__}.tasks({split!r}, {count})", defined_at(taskset.tasks)
    if not isinstance(tasks, Sequence):
        raise UserError(f"{call} returned a {type(tasks).__name__}, not a list of tasks{place}")
    ids: set[str] = set()
    for task in () if taskset.splits_apart else tasks:
        if not isinstance(task, Task):
            raise UserError(f"{call} returned {task!r:.80} among the tasks, which is not a Task{place}")
        if not isinstance(task.id, str):
            raise UserError(f"{call} gave the id {task.id!r:.80}, but ids are texts{place}")
        try:
            check_messages(task.prompt)
        except (TypeError, ValueError) as error:
            raise UserError(f"{call} gave the prompt of task {task.id!r}: {error}{place}") from None
        if task.id in ids:
            raise UserError(f"{call} gave the id {task.id!r} to several tasks, but one id means one problem{place}")
        ids.add(task.id)
    if len(tasks) < count:
        raise UserError(
            f"environment {settings.name!r} has {len(tasks)} {split} tasks, {count} were asked for; "
            f"lower environment.{split}_tasks"
        )
    return tasks[:count]


def check_tokenizer(run: RunFolder, config: Config, tokenizer: Any) -> None:
    """Check that the ``tokenizer`` of a tiny model is the one in the run's folder, with which its weights were trained.

    It is made from texts of the environment, and so are the token ids.

    Raises:
        UserError: the texts have changed, or the saved tokenizer cannot be loaded.
    """
    if config.model.init != "tiny":
        return
    saved = saved_tokenizer(run, {})
    if saved is not None and saved != tokenizer_fingerprint(tokenizer, {}):
        raise UserError(
            f"{run.path}: the texts of the environment have changed since the run began, and with them the tokenizer "
            "of its tiny model; undo the change, or start another run"
        )


def saved_tokenizer(run: RunFolder, template_options: Mapping[str, Any]) -> str | None:
    """Return the `tokenizer_fingerprint` of the run's tokenizer, or None if the folder has no tokenizer.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not run.tokenizer_path.is_dir():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(run.tokenizer_path, local_files_only=True)
        return tokenizer_fingerprint(tokenizer, template_options)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run.tokenizer_path} does not load ({str(error).splitlines()[0]})") from error


def tokenizer_fingerprint(tokenizer: Any, template_options: Mapping[str, Any]) -> str:
    """Return a hash of the tokenizer, its chat template and the template's options.

    Two runs with the same fingerprint turn each conversation into the same token ids.
    """
    backend, options = tokenizer.backend_tokenizer.to_str(), filter(None, [template_options])
    return fingerprint("tokenizer", backend, tokenizer.chat_template, *options)
