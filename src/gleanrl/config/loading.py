"""A run's configuration: presets, TOML files, command-line overrides, and the checks that span sections."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from gleanrl.config import settings as s
from gleanrl.config.guidance_settings import GuidanceSettings
from gleanrl.config.job import JobConfig
from gleanrl.config.ray_settings import RaySettings
from gleanrl.config.task_settings import TaskSettings
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.utils.errors import UserError


class Config(JobConfig):
    """All settings of a run that trains a language model."""

    environment: s.EnvironmentSettings = s.EnvironmentSettings()
    tasks: TaskSettings = TaskSettings()
    model: s.ModelSettings = s.ModelSettings()
    warm_start: s.WarmStartSettings = s.WarmStartSettings()
    sampler: s.SamplerSettings = s.SamplerSettings()
    context: s.ContextSettings = s.ContextSettings()
    reward: s.RewardSettings = s.RewardSettings()
    schedule: s.ScheduleSettings = s.ScheduleSettings()
    credit: s.CreditSettings = s.CreditSettings()
    critic: s.CriticSettings = s.CriticSettings()
    replay: s.ReplaySettings = s.ReplaySettings()
    guidance: GuidanceSettings = GuidanceSettings()
    loss: s.LossSettings = s.LossSettings()
    learner: s.LearnerSettings = s.LearnerSettings()
    evaluation: s.EvaluationSettings = s.EvaluationSettings()
    checkpoint: s.CheckpointSettings = s.CheckpointSettings()
    monitor: s.MonitorSettings = s.MonitorSettings()
    ray: RaySettings = RaySettings()

    identity: ClassVar[tuple[str, ...]] = (
        "run.seed",
        *(f"environment.{name}" for name in ("name", "options", "train_tasks", "warm_start_tasks")),
        *(f"model.{name}" for name in s.ModelSettings.model_fields if name not in ("device", "dtype")),
        *(f"warm_start.{name}" for name in s.WarmStartSettings.model_fields),
        "tasks.order",
        "schedule.batch",
        "learner.lora_rank",
    )

    def plan(self) -> dict[str, str]:
        schedule, evaluation = self.schedule, self.evaluation
        episodes = self.run.steps * schedule.batch * schedule.group
        attempts = self.environment.eval_tasks * (evaluation.samples + evaluation.greedy)
        times = 2 + (self.run.steps - 1) // evaluation.every if evaluation.every else 2
        updates = self.run.steps * self.learner.updates_per_step * self.learner.epochs
        ray = self.ray
        actors = f"samplers {ray.samplers}, environments {ray.environments}, {ray.placement}"
        return {
            "run folder": str(self.path),
            **({"Ray actors": f"{actors}, on {ray.address or 'this machine'}"} if ray.enabled else {}),
            "training": f"{self.run.steps} steps x {schedule.batch} groups x {schedule.group} = {episodes} episodes "
            f"of at most {self.context.max_turns} turns, schedule {schedule.preset}",
            "updates": f"{updates} of {self.credit.estimator} / {self.loss.name}",
            "evaluation": f"{times} times {attempts} episodes on {self.environment.eval_tasks} held-out tasks",
        }


JOBS: Mapping[str, type[JobConfig]] = {"embodied": EmbodiedConfig}
"""What a top-level key ``job`` may say; without it a language model is trained."""


def presets() -> list[str]:
    folder = resources.files("gleanrl.config") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(source: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The configuration of a preset or TOML file with ``section.key`` overrides applied and checked.

    Raises:
        UserError: no such preset or file, broken TOML, an unknown key (names the nearest), a value of the
            wrong kind, a combination that cannot work, or a job other than a language model's.
    """
    config = load_job(source, overrides)
    if not isinstance(config, Config):
        raise UserError(f"{source} does not train a language model; it is for `gleanrl train` and `gleanrl evaluate`")
    return config


def load_job(source: str, overrides: Sequence[tuple[str, str]] = ()) -> JobConfig:
    """`load`, of any job: its key ``job`` says which."""
    name, data = _read(source)
    data.setdefault("run", {}).setdefault("name", name)
    return _checked(data, source, overrides)


def of_environment(name: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The defaults with the environment ``name`` and overrides. Raises `UserError` as `load` does."""
    config = _checked({"environment": {"name": name}}, "the command line", overrides)
    assert isinstance(config, Config)
    return config


def _checked(data: dict[str, Any], source: str, overrides: Sequence[tuple[str, str]]) -> JobConfig:
    model = _model(data, source)
    for key, value in overrides:
        _set(data, key, value, model)
    try:
        config = model.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, source, model)) from None
    if isinstance(config, Config):
        config = with_usual_values(config)
        check(config)
    return config


def with_usual_values(config: Config) -> Config:
    """The configuration with a learning rate and a length of answers that suit its model, where it sets none."""
    if config.model.init == "tiny":
        return config
    learner, context = config.learner, config.context
    if "lr" not in learner.model_fields_set:
        learner = learner.model_copy(update={"lr": 1e-5 if learner.lora_rank else 1e-6})
    if "max_tokens_per_turn" not in context.model_fields_set:
        context = context.model_copy(update={"max_tokens_per_turn": min(256, (config.model.max_context + 1) // 2)})
    return config.model_copy(update={"learner": learner, "context": context})


def stored(folder: RunFolder) -> JobConfig:
    """The configuration that a run was started with."""
    data = folder.read_config()
    return _model(data, str(folder.config_path)).model_validate(data)


def check(config: Config) -> None:
    """What no single section can see, as far as it does not depend on the algorithms (`gleanrl.config.validate`).

    Raises:
        UserError: the first combination that cannot work, and the mend.
    """
    schedule, context, learner = config.schedule, config.context, config.learner
    if schedule.batch % learner.updates_per_step:
        raise UserError(
            f"schedule.batch = {schedule.batch} is not divisible by "
            f"learner.updates_per_step = {learner.updates_per_step}"
        )
    pipelined = schedule.preset in {"pipelined", "pipelined_one_step_off", "bounded_async"}
    if pipelined and schedule.batch % schedule.chunks:
        raise UserError(f"schedule.batch = {schedule.batch} is not divisible by schedule.chunks = {schedule.chunks}")
    if learner.epochs > 1 and schedule.preset not in {"sync", "one_step_off"}:
        raise UserError(f"learner.epochs = {learner.epochs} needs whole mini-batches; use schedule.preset = 'sync'")
    if context.max_tokens_per_turn >= config.model.max_context:
        raise UserError(
            f"context.max_tokens_per_turn = {context.max_tokens_per_turn} leaves no room in "
            f"model.max_context = {config.model.max_context}"
        )
    if config.sampler.temperature == 0:
        raise UserError("sampler.temperature = 0 samples every member of a group alike; GRPO needs it above 0")
    if config.model.init == "tiny" and config.model.hidden_size % config.model.heads:
        raise UserError(
            f"model.hidden_size = {config.model.hidden_size} is not divisible by model.heads = {config.model.heads}"
        )
    if config.model.init == "tiny" and config.model.heads % config.model.kv_heads:
        raise UserError(
            f"model.heads = {config.model.heads} is not divisible by model.kv_heads = {config.model.kv_heads}"
        )


def check_resumed(before: JobConfig, now: JobConfig) -> None:
    """A resumed run keeps what makes it the same run (`JobConfig.identity`): its tasks, model, seed and so on.

    Anything else may change (steps, rates, workers).

    Raises:
        UserError: the first key that differs, with both values.
    """
    if type(before) is not type(now):
        raise UserError(f"{before.path} holds a run of another kind; start this one with another --run.name")
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for key in now.identity:
        section, name = key.split(".")
        if old[section][name] != new[section][name]:
            raise UserError(
                f"{before.path} was started with {key} = {old[section][name]!r}, which cannot become "
                f"{new[section][name]!r} on --resume; start another run with --run.name"
            )


# --- reading ------------------------------------------------------------------------------------
def _read(source: str) -> tuple[str, dict[str, Any]]:
    if source.endswith(".toml"):
        path = Path(source)
        try:
            text = path.read_text()
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
        name = path.stem
    else:
        if source not in presets():
            near = difflib.get_close_matches(source, presets(), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(presets())}; a file ends in .toml"
            raise UserError(f"no preset {source!r}; {hint}")
        text, name = (resources.files("gleanrl.config") / "presets" / f"{source}.toml").read_text(), source
    try:
        return name, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not valid TOML: {error}") from None


def _model(data: Mapping[str, Any], source: str) -> type[JobConfig]:
    """The kind of configuration that a file holds."""
    if "job" not in data:
        return Config
    if data["job"] not in JOBS:
        raise UserError(f"{source}: job = {data['job']!r}; known: {', '.join(JOBS)}, or none for a language model")
    return JOBS[data["job"]]


def _set(data: dict[str, Any], key: str, text: str, model: type[JobConfig]) -> None:
    """Put an override into nested tables; the field's type decides how its text is read."""
    *sections, last = key.split(".")
    if not sections:
        raise UserError(f"--{key} names no section; write --section.key value{_nearest_everywhere(key, model)}")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"--{key}: {section} is not a table")
    data[last] = text if _is_text(key, model) else _value(text)


def _value(text: str) -> Any:
    """A TOML value (number, boolean, array, table), or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _is_text(key: str, model: Any) -> bool:
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
    return model is str or set(get_args(model)) == {str, type(None)}


def keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Every key of the configuration, dotted."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _explain(error: ValidationError, source: str, model: type[JobConfig]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section, _, last = key.rpartition(".")
        known = [key.rpartition(".") for key in keys(model)]
        siblings = [name for own, _, name in known if own == section] if section else list(model.model_fields)
        near = difflib.get_close_matches(last, siblings, 1)
        if near:
            return f"{source}: unknown key {key!r}; did you mean {f'{section}.{near[0]}'.lstrip('.')!r}?"
        return f"{source}: unknown key {key!r}{_nearest_everywhere(last, model)}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{source}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"


def _nearest_everywhere(name: str, model: type[JobConfig]) -> str:
    near = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys(model)}, 1)
    if not near:
        return f"; sections: {', '.join(model.model_fields)}"
    return f"; did you mean {' or '.join(repr(key) for key in keys(model) if key.rpartition('.')[2] == near[0])}?"


def plan(config: JobConfig) -> str:
    """What a run of this configuration will do, in a few lines."""
    return "\n".join(f"# {name:<12} {text}" for name, text in config.plan().items())
