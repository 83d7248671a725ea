"""Reads the configuration of a run from a preset or a TOML file, and applies overrides from the command line.

    config = load("quickstart", [("learner.lr", "1e-4")])

Invalid input raises `UserError`. Its message is one line that names the invalid key. If the key is unknown, the message
suggests the setting that another trainer calls so, or the most similar known key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gleanrl.config import validate
from gleanrl.config.aliases import OTHER_NAMES
from gleanrl.config.settings import Config
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import JobConfig
from gleanrl.utils.text import nearest

JOBS: Mapping[str, type[JobConfig]] = {"embodied": EmbodiedConfig}
"""Value of the top-level key ``job`` -> class of the configuration. A configuration without this key trains a language
model and has the class `Config`."""

Overrides = Sequence[tuple[str, str | None]]
"""Pairs of a dotted key, such as ``learner.lr``, and its value as text. They are applied in this order. The value None
stands for a key without a value, which turns a setting of type bool on."""


def presets() -> list[str]:
    """Return the names of the presets that are installed with the package, sorted."""
    folder = resources.files("gleanrl.config") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def describe(source: str) -> str:
    """Return the comment at the top of the preset ``source``: what it trains, and how long that takes.

    The result is empty for the path of a file.
    """
    if source not in presets():
        return ""
    lines = (resources.files("gleanrl.config") / "presets" / f"{source}.toml").read_text().splitlines()
    return "\n".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def load(source: str, overrides: Overrides = ()) -> Config:
    """Return the checked configuration of a run that trains a language model.

    ``source`` is the name of a preset or the path of a ``.toml`` file. Each override is a key, such as ``learner.lr``,
    and its value as text.

    Raises:
        UserError: there is no such preset or file, the file is not valid TOML, a key is unknown, a value is not
            allowed, some settings cannot work together, or the file configures another kind of job.
    """
    config = load_job(source, overrides)
    if not isinstance(config, Config):
        raise UserError(f"{source} does not train a language model; it is for `gleanrl train` and `gleanrl evaluate`")
    return config


def load_job(source: str, overrides: Overrides = ()) -> JobConfig:
    """Return the checked configuration of any kind of job. The file's top-level key ``job`` selects the kind.

    A file without that key trains a language model. Arguments and errors are those of `load`, except that every kind is
    accepted.
    """
    name, data = _read(source)
    if isinstance(run := data.setdefault("run", {}), dict):
        run.setdefault("name", name)
    return _check(_validate(data, source, overrides))


def load_defaults(overrides: Overrides) -> Config:
    """Return the default configuration of a run that trains a language model, with ``overrides`` applied.

    Raises `UserError` as `load` does.
    """
    config = _check(_validate({}, "the command line", overrides))
    assert isinstance(config, Config)
    return config


def load_stored(path: Path) -> JobConfig:
    """Return the configuration of an existing run from its config.toml.

    Every value is validated, but the checks that involve several sections are not repeated.
    """
    return _validate(_read(str(path))[1], str(path), ())


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key, such as ``learner.lr``, and the field of each setting of a configuration class."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _read(source: str) -> tuple[str, dict[str, Any]]:
    """Read a preset or a TOML file. Returns its name without ``.toml``, and its parsed content."""
    if source.endswith(".toml"):
        try:
            name, text = Path(source).stem, Path(source).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
    elif source in presets():
        name, text = source, (resources.files("gleanrl.config") / "presets" / f"{source}.toml").read_bytes()
    else:
        hint = nearest(source, presets()) or f"; presets: {', '.join(presets())}; a file ends in .toml"
        raise UserError(f"no preset {source!r}{hint}")
    try:
        return name, tomllib.loads(text.decode())
    except ValueError as error:  # of the decoding or of the parser
        raise UserError(f"{source} is not valid TOML: {error}") from None


def _validate(data: dict[str, Any], source: str, overrides: Overrides) -> JobConfig:
    """Apply ``overrides`` to ``data`` in place, and return ``data`` as a validated configuration.

    The key ``job`` in ``data`` selects the configuration's class. Error messages name ``source``.
    """
    if data.get("job", "embodied") not in list(JOBS):  # a list, because the value may not be hashable
        raise UserError(f"{source}: job = {data['job']!r}; known: {', '.join(JOBS)}, or none for a language model")
    model = JOBS[data["job"]] if "job" in data else Config
    for key, text in overrides:
        _override(data, key, text, model)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, source, model)) from None


def _check(config: JobConfig) -> JobConfig:
    """Return ``config`` with the defaults that depend on other settings, and check the rules between sections.

    The defaults are those of ``learner.lr`` and ``context.max_tokens_per_turn``, which differ for models other than the
    tiny one, and that of ``replay.success_threshold``. The configuration of another kind of job is returned unchanged.
    """
    if not isinstance(config, Config):
        return config
    if "success_threshold" not in config.replay.model_fields_set:
        replay = config.replay.model_copy(update={"success_threshold": config.reward.success_threshold})
        config = config.model_copy(update={"replay": replay})
    if config.model.init != "tiny":
        learner, context = config.learner, config.context
        if "lr" not in learner.model_fields_set:
            learner = learner.model_copy(update={"lr": 1e-5 if learner.lora_rank else 1e-6})
        if "max_tokens_per_turn" not in context.model_fields_set:
            context = context.model_copy(update={"max_tokens_per_turn": min(256, (config.model.max_context + 1) // 2)})
        config = config.model_copy(update={"learner": learner, "context": context})
    validate.check_sections(config)
    return config


def _override(data: dict[str, Any], key: str, text: str | None, model: type[JobConfig]) -> None:
    """Set the dotted ``key`` in the nested tables ``data`` to ``text``, which is parsed as a TOML value.

    Missing tables are created. If the setting is of type ``str`` or ``str | None``, or if ``text`` is not a TOML value,
    then ``text`` is stored as a string.
    """
    *sections, last = key.split(".")
    if not sections:
        raise UserError(f"--{key} names no section; write --section.key value{_suggestion(key, model)}")
    field: Any = model
    for part in key.split("."):
        if isinstance(field, type) and issubclass(field, BaseModel):
            if part not in field.model_fields:
                raise UserError(f"unknown key {key!r}{_suggestion(key, model)}")
            field = field.model_fields[part].annotation
        else:  # the key is inside a table, such as environment.options.goals
            field = None
    if text is None and bool not in (field, *get_args(field)):
        raise UserError(f"--{key} needs a value")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"--{key}: {section} is not a table")
    data[last] = True if text is None else text
    if text is not None and field is not str and set(get_args(field)) != {str, type(None)}:
        with suppress(tomllib.TOMLDecodeError):
            data[last] = tomllib.loads(f"value = {text}")["value"]


def _explain(error: ValidationError, source: str, model: type[JobConfig]) -> str:
    """Return a one-line message about the first error. For an unknown key, it suggests the most similar known key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return f"{source}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"
    value = first["input"]
    while isinstance(value, dict) and value:  # for an unknown table, the first key in it says more
        part, value = next(iter(value.items()))
        key = f"{key}.{part}"
    return f"{source}: unknown key {key!r}{_suggestion(key, model)}"


def _suggestion(key: str, model: type[JobConfig]) -> str:
    """Return the end of the error message about an unknown ``key``: the keys that may be meant, or all that there are.

    These are the key that differs in a letter, or else those that have the same last part or that another trainer calls
    so, or else those with a similar last part, in the same section if there are any.
    """
    if key.startswith("ray.") and "ray" not in model.model_fields:  # --runtime sets such a key, too
        return f"; an {model.kind} run is always in one process: leave out --runtime, --ray-address and keys of ray"
    keys = [known for known, _ in fields(model)]
    meant = get_close_matches(key, keys, 1, cutoff=0.9)
    names = {section: [section] for section in model.model_fields}
    for known in (*keys, "--resume"):
        for name in (known.rpartition(".")[2], *OTHER_NAMES.get(known, ())):
            names.setdefault(name, []).append(known)
    section, _, last = key.rpartition(".")
    end = key  # the longest end of the key that has a meaning, such as "rollout.n"
    while not meant and end:
        meant = names.get(end, [])
        end = end.partition(".")[2]
    if not meant:
        # Only mistyped names. With the usual cutoff of 0.6, ``min_p`` would be close to ``min_rate``.
        near = get_close_matches(last, names, 1, cutoff=0.75)
        meant = [known for name in near for known in names[name]]
        meant = [known for known in meant if known.startswith(f"{section}.")] or meant
    if not meant:
        own = [known.removeprefix(f"{section}.") for known in keys if known.startswith(f"{section}.")]
        return f"; {section} has {', '.join(own)}" if own else f"; sections: {', '.join(model.model_fields)}"
    return f"; did you mean {' or '.join(map(repr, meant))}?"
