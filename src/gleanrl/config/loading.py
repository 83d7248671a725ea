"""Reads a run's configuration from a preset, a TOML file and command-line overrides.

    config = load("quickstart", [("learner.lr", "1e-4")])

A user's mistake raises `UserError` with one line that names the key and, if the key is unknown, the most similar one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gleanrl.config import validate
from gleanrl.config.settings import Config
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import JobConfig
from gleanrl.utils.text import nearest

JOBS: Mapping[str, type[JobConfig]] = {"embodied": EmbodiedConfig}
"""Configuration class by the top-level key ``job``; without that key the configuration trains a language model."""

Overrides = Sequence[tuple[str, str]]
"""Pairs of a dotted key and its text, in the order in which they apply."""


def presets() -> list[str]:
    """Return the names of the presets that come with the package."""
    folder = resources.files("gleanrl.config") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(source: str, overrides: Overrides = ()) -> Config:
    """Read a preset or TOML file that trains a language model, apply ``section.key`` overrides, and check the result.

    Raises:
        UserError: no such preset or file, broken TOML, an unknown key (the message names the most similar one), a
            value of the wrong kind, a combination that cannot work, or a job other than a language model's.
    """
    config = load_job(source, overrides)
    if not isinstance(config, Config):
        raise UserError(f"{source} does not train a language model; it is for `gleanrl train` and `gleanrl evaluate`")
    return config


def load_job(source: str, overrides: Overrides = ()) -> JobConfig:
    """Like `load`, for any job: the key ``job`` of the file selects it."""
    name, data = _read(source)
    data.setdefault("run", {}).setdefault("name", name)
    return _check(_validate(data, source, overrides))


def load_defaults(overrides: Overrides) -> Config:
    """Return the default settings with overrides. Raises `UserError` as `load` does."""
    config = _check(_validate({}, "the command line", overrides))
    assert isinstance(config, Config)
    return config


def load_stored(path: Path) -> JobConfig:
    """Return the configuration that a run was started with, from its config.toml, without the checks of a new run."""
    return _validate(_read(str(path))[1], str(path), ())


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each field of a configuration with its dotted key."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _read(source: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the tables of a preset or a file."""
    if source.endswith(".toml"):
        try:
            name, text = Path(source).stem, Path(source).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
    elif source in presets():
        name, text = source, (resources.files("gleanrl.config") / "presets" / f"{source}.toml").read_text()
    else:
        hint = nearest(source, presets()) or f"; presets: {', '.join(presets())}; a file ends in .toml"
        raise UserError(f"no preset {source!r}{hint}")
    try:
        return name, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not valid TOML: {error}") from None


def _validate(data: dict[str, Any], source: str, overrides: Overrides) -> JobConfig:
    """Apply the overrides to the tables and return the validated configuration of their job."""
    if data.get("job", "embodied") not in JOBS:
        raise UserError(f"{source}: job = {data['job']!r}; known: {', '.join(JOBS)}, or none for a language model")
    model = JOBS[data["job"]] if "job" in data else Config
    for key, text in overrides:
        _override(data, key, text, model)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, source, model)) from None


def _check(config: JobConfig) -> JobConfig:
    """Set the defaults that depend on the model, check the rules between sections, and return the configuration."""
    if not isinstance(config, Config):
        return config
    if config.model.init != "tiny":
        learner, context = config.learner, config.context
        if "lr" not in learner.model_fields_set:
            learner = learner.model_copy(update={"lr": 1e-5 if learner.lora_rank else 1e-6})
        if "max_tokens_per_turn" not in context.model_fields_set:
            context = context.model_copy(update={"max_tokens_per_turn": min(256, (config.model.max_context + 1) // 2)})
        config = config.model_copy(update={"learner": learner, "context": context})
    validate.check_sections(config)
    return config


def _override(data: dict[str, Any], key: str, text: str, model: type[JobConfig]) -> None:
    """Set a dotted key in nested tables.

    ``text`` is a TOML value (number, boolean, array, table) unless the key's field takes text or TOML cannot read it.
    """
    *sections, last = key.split(".")
    if not sections:
        raise UserError(f"--{key} names no section; write --section.key value{_nearest_key(key, model)}")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"--{key}: {section} is not a table")
    field: Any = model
    for part in key.split("."):
        known = isinstance(field, type) and issubclass(field, BaseModel) and part in field.model_fields
        field = field.model_fields[part].annotation if known else None
    data[last] = text
    if field is not str and set(get_args(field)) != {str, type(None)}:
        with suppress(tomllib.TOMLDecodeError):
            data[last] = tomllib.loads(f"value = {text}")["value"]


def _explain(error: ValidationError, source: str, model: type[JobConfig]) -> str:
    """Describe the first error in one line."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return f"{source}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"
    section, _, last = key.rpartition(".")
    if section:
        siblings = [known for known, _ in fields(model) if known.rpartition(".")[0] == section]
    else:
        siblings = list(model.model_fields)
    near = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in siblings], 1)
    if near:
        return f"{source}: unknown key {key!r}; did you mean {f'{section}.{near[0]}'.lstrip('.')!r}?"
    return f"{source}: unknown key {key!r}{_nearest_key(last, model)}"


def _nearest_key(name: str, model: type[JobConfig]) -> str:
    """Return a hint for a key that is unknown in its section: the most similar keys of other sections."""
    keys = [key for key, _ in fields(model)]
    near = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys}, 1)
    if not near:
        return f"; sections: {', '.join(model.model_fields)}"
    return f"; did you mean {' or '.join(repr(key) for key in keys if key.rpartition('.')[2] == near[0])}?"
