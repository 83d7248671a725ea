"""A run's configuration: presets, TOML files, command-line overrides, and the checks that span sections."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError

from gleanrl import settings as s
from gleanrl.errors import UserError


class RunSettings(s.Settings):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    folder: str = "runs"
    """Where run folders are made: `folder/name`."""
    seed: s.NonNegative = 0
    """Redraws everything: tasks, warm start, sampling."""
    steps: s.Positive = 20
    threads: s.NonNegative = 0
    """CPU threads of the tensor library; 0 = all cores."""


class Config(s.Settings):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    environment: s.EnvironmentSettings = s.EnvironmentSettings()
    model: s.ModelSettings = s.ModelSettings()
    warm_start: s.WarmStartSettings = s.WarmStartSettings()
    sampler: s.SamplerSettings = s.SamplerSettings()
    context: s.ContextSettings = s.ContextSettings()
    reward: s.RewardSettings = s.RewardSettings()
    schedule: s.ScheduleSettings = s.ScheduleSettings()
    credit: s.CreditSettings = s.CreditSettings()
    critic: s.CriticSettings = s.CriticSettings()
    replay: s.ReplaySettings = s.ReplaySettings()
    guidance: s.GuidanceSettings = s.GuidanceSettings()
    loss: s.LossSettings = s.LossSettings()
    learner: s.LearnerSettings = s.LearnerSettings()
    evaluation: s.EvaluationSettings = s.EvaluationSettings()
    checkpoint: s.CheckpointSettings = s.CheckpointSettings()
    monitor: s.MonitorSettings = s.MonitorSettings()

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run.folder) / self.run.name

    def to_toml(self) -> str:
        """The resolved configuration; reading it back gives an equal one."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def presets() -> list[str]:
    folder = resources.files("gleanrl") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(source: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The configuration of a preset or TOML file with ``section.key`` overrides applied and checked.

    Raises:
        UserError: no such preset or file, broken TOML, an unknown key (names the nearest), a value of the
            wrong kind, or a combination that cannot work.
    """
    name, data = _read(source)
    data.setdefault("run", {}).setdefault("name", name)
    for key, value in overrides:
        _set(data, key, value)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from None
    check(config)
    return config


def check(config: Config) -> None:
    """What no single section can see, as far as it does not depend on the algorithms (`gleanrl.runtime.algorithm`).

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


def check_resumed(before: Config, now: Config) -> None:
    """A resumed run keeps what makes it the same run: its tasks, model, warm start, seed and batch.

    Anything else may change (steps, rates, schedule, workers).

    Raises:
        UserError: the first key that differs, with both values.
    """
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for key in _IDENTITY:
        section, name = key.split(".")
        if old[section][name] != new[section][name]:
            raise UserError(
                f"{before.path} was started with {key} = {old[section][name]!r}, which cannot become "
                f"{new[section][name]!r} on --resume; start another run with --run.name"
            )


_IDENTITY = (
    "run.seed",
    *(f"environment.{name}" for name in ("name", "options", "train_tasks", "warm_start_tasks")),
    *(f"model.{name}" for name in s.ModelSettings.model_fields if name not in ("device", "dtype")),
    *(f"warm_start.{name}" for name in s.WarmStartSettings.model_fields),
    "schedule.batch",
    "learner.lora_rank",
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
        text, name = (resources.files("gleanrl") / "presets" / f"{source}.toml").read_text(), source
    try:
        return name, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not valid TOML: {error}") from None


def _set(data: dict[str, Any], key: str, text: str) -> None:
    """Put an override into nested tables; the field's type decides how its text is read."""
    *sections, last = key.split(".")
    if not sections:
        raise UserError(f"--{key} names no section; write --section.key value{_nearest_everywhere(key)}")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"--{key}: {section} is not a table")
    data[last] = text if _is_text(key) else _value(text)


def _value(text: str) -> Any:
    """A TOML value (number, boolean, array, table), or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _is_text(key: str) -> bool:
    model: Any = Config
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
    return model is str or set(get_args(model)) == {str, type(None)}


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterable[str]:
    """Every key of the configuration, dotted."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _explain(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section, _, last = key.rpartition(".")
        siblings = [k.rpartition(".")[2] for k in keys() if k.rpartition(".")[0] == section] if section else _sections()
        near = difflib.get_close_matches(last, siblings, 1)
        if near:
            return f"{source}: unknown key {key!r}; did you mean {f'{section}.{near[0]}'.lstrip('.')!r}?"
        return f"{source}: unknown key {key!r}{_nearest_everywhere(last)}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{source}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"


def _sections() -> list[str]:
    return list(Config.model_fields)


def _nearest_everywhere(name: str) -> str:
    near = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys()}, 1)
    if not near:
        return f"; sections: {', '.join(_sections())}"
    return f"; did you mean {' or '.join(repr(key) for key in keys() if key.rpartition('.')[2] == near[0])}?"


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value


def plan(config: Config) -> str:
    """What a run of this configuration will do, in a few lines."""
    schedule, evaluation = config.schedule, config.evaluation
    episodes = config.run.steps * schedule.batch * schedule.group
    attempts = config.environment.eval_tasks * (evaluation.samples + evaluation.greedy)
    times = 2 + (config.run.steps - 1) // evaluation.every if evaluation.every else 2
    updates = config.run.steps * config.learner.updates_per_step * config.learner.epochs
    lines = {
        "run folder": str(config.path),
        "training": f"{config.run.steps} steps x {schedule.batch} groups x {schedule.group} = {episodes} episodes "
        f"of at most {config.context.max_turns} turns, schedule {schedule.preset}",
        "updates": f"{updates} of {config.credit.estimator} / {config.loss.name}",
        "evaluation": f"{times} times {attempts} episodes on {config.environment.eval_tasks} held-out tasks",
    }
    return "\n".join(f"# {name:<12} {text}" for name, text in lines.items())
