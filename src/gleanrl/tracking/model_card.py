"""Writes the model card of an exported model: a README.md as the Hugging Face hub shows it.

`gleanrl train` writes one next to the model after the last step, and `gleanrl export` one into each folder. All
figures are from the run's own metrics.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from gleanrl import __version__
from gleanrl.config.loading import load_defaults
from gleanrl.config.settings import Config
from gleanrl.runtime.run_folder import Row
from gleanrl.tracking.report.facts import facts
from gleanrl.utils.errors import UserError
from gleanrl.utils.secrets import refuse_key_in_url, refuse_keys

LICENCE = ("license", "license_name", "license_link")
"""Keys of a card's metadata that are taken from the card of the base model."""
_OTHER_SECTIONS = ("checkpoint", "monitor", "ray")
_OTHER_RUN_SETTINGS = ("name", "folder", "threads")
_LEFT_OUT = "[left out]"
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]+")
_NAMED = re.compile(
    r"(?:--(?P<flag>[\w-]+)\s+|(?P<name>[\w-]+)['\"]?\s*[=:]\s*)['\"]?(?:(?:Basic|Bearer)\s+)?(?P<value>[^\s'\",;&)]+)"
)
"""Pattern of a name and its value within a text, such as ``password=...`` and ``--api-key ...``."""
_FOLDERS = re.compile(
    r"(?<![\w./<~\]-])(?:file://)?(?:~[\w.-]*|/[^\s/'\"`,;:()<>|]+)/(?:[^\s/'\"`,;:()<>|]+/)*"
    r"|(?<!\w)[A-Za-z]:\\(?:[^\s\\'\"]+\\)*"
)
"""Pattern of the folders of an absolute path within a text. A command such as ``/no_think`` has none."""


def read_licence(config: Config, *, ask_hub: bool = False) -> dict[str, str]:
    """Return the licence of the base model as metadata, from the README.md in its directory.

    With ``ask_hub``, the licence of a model on the hub is looked up there. The result is empty if it is not known.
    """
    from huggingface_hub import HfApi, ModelCard

    data: Any = None
    readme = Path(config.model.init).expanduser() / "README.md"
    try:
        if readme.is_file():
            data = ModelCard.load(readme, ignore_metadata_errors=True).data
        elif ask_hub and (name := config.model.hub_id):
            data = HfApi().model_info(name, timeout=30.0).card_data
    except Exception:  # damaged metadata, no access or no network: the card is complete without a licence
        return {}
    return {key: value for key in LICENCE if isinstance(value := getattr(data, key, None), str)}


def model_card(
    config: Config, rows: Sequence[Row], step: int, *, adapters: bool, licence: Mapping[str, str] | None = None
) -> str:
    """Return the model card of the policy after ``step`` steps of a run, as Markdown with metadata.

    Args:
        rows: metrics of the run; those after ``step`` are ignored.
        adapters: whether the folder contains LoRA adapters instead of a whole model.
        licence: metadata of the licence, see `read_licence`. By default the card names none.
    """
    from huggingface_hub import ModelCardData

    lora, base = config.learner.lora_rank, config.model.hub_id
    found = facts([row for row in rows if row.step <= step], tomllib.loads(config.to_toml()))
    metadata: dict[str, Any] = {
        **(licence or {}),
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gleanrl", "reinforcement-learning", *(["lora"] if lora else [])],
    }
    if base is not None:
        metadata |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    if adapters:
        kind = f"LoRA adapters of rank {lora} and alpha {config.learner.lora_alpha:g}, in the format of PEFT"
    elif lora:
        kind = f"the whole model, with LoRA adapters of rank {lora} merged into it"
    else:
        kind = "the whole model; all weights were trained"
    own = "the tiny model" if config.model.init == "tiny" else f"a local model, {Path(config.model.init).name}"
    start = base or own
    if config.warm_start.enabled:
        start += f", after {config.warm_start.steps} steps of supervised learning on demonstrations"
    schedule = config.schedule
    about = {
        "starts from": start,
        "holds": kind,
        "environment": _publishable(config.environment.name),
        "reward": _publishable(config.reward.name),
        "algorithm": f"advantages {config.credit.estimator}, loss {config.loss.name}",
        "training": f"{step} steps of {schedule.batch} groups of {schedule.group} episodes, schedule {schedule.preset}",
        "experience replay": "on" if config.replay.enabled else "off",
        "seed": str(config.run.seed),
        "Glean RL": __version__,
    }
    if config.context.template_options:
        names = ", ".join(f"`{name}`" for name in config.context.template_options)
        about["chat template"] = f"to be applied with {names} as in `context.template_options` below"
    lines = [
        f"# {config.run.name}",
        "",
        "A language model trained by reinforcement learning with Glean RL.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in about.items()),
        "",
        "## Results on held-out tasks",
        "",
    ]
    if found["evaluation"]:
        first, last = found["evaluation"][0]["first"], found["evaluation"][0]["last"]
        lines += [
            f"{config.environment.eval_tasks} tasks that the run did not train on, with {config.evaluation.samples} "
            "sampled attempts each. Step 0 is before reinforcement learning.",
            "",
            f"| measure | step {first['step']} |" + (f" step {last['step']} |" if last else ""),
            "|---|---|" + ("---|" if last else ""),
        ]
        for line in found["evaluation"]:
            cells = [line["label"]]
            for end in ("first", "last") if last else ("first",):
                cells.append(_value(line[end], line["unit"]) if line[end] else "")
            lines.append(f"| {' | '.join(cells)} |")
    else:
        lines.append("The run was not evaluated.")
    settings = _publishable(_differing(tomllib.loads(config.to_toml()), tomllib.loads(load_defaults([]).to_toml())))
    lines += [
        "",
        "## How to train it again",
        "",
        "`gleanrl train train.toml`, where `train.toml` contains the settings that differ from the defaults:",
        "",
        "```toml",
        tomli_w.dumps(settings).strip(),
        "```",
        "",
    ]
    return f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n\n" + "\n".join(lines)


def _value(end: Mapping[str, Any], unit: str) -> str:
    """Format a result and, if it is known, its confidence interval."""
    form = (lambda value: f"{100 * value:.1f} %") if unit == "rate" else (lambda value: f"{value:.3g}")
    if end["low"] is None or end["high"] is None:
        return form(end["value"])
    return f"{form(end['value'])} ({form(end['low'])} to {form(end['high'])})"


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in nested ``values`` that differ from ``defaults``, without those that affect no result."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name in _OTHER_SECTIONS:
            continue
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _differing(value, default)
            if name == "run":
                value = {key: inner for key, inner in value.items() if key not in _OTHER_RUN_SETTINGS}
            if value:
                kept[name] = value
        elif value != default:
            kept[name] = value
    return kept


def _publishable(value: Any, name: str = "") -> Any:
    """Return the setting ``value`` without keys, and with each absolute path in it shortened to the last name.

    Both may also be parts of a longer text. Options of an environment may contain a key, because only its author knows
    which of them are keys.
    """
    if isinstance(value, str):
        text = _without_keys(value, name)
        # The folders of a text that is a path itself may have names with spaces.
        return Path(text).name if _FOLDERS.match(text) else _FOLDERS.sub("", text)
    if isinstance(value, Mapping):
        return {_publishable(key): _publishable(inner, key) for key, inner in value.items()}
    return [_publishable(inner, name) for inner in value] if isinstance(value, list) else value


def _without_keys(text: str, name: str) -> str:
    """Return ``text``, the value of the setting ``name``, with ``[left out]`` in place of what seems to be a key."""

    def part(match: re.Match[str]) -> str:
        before = match[0].removesuffix(match["value"])
        return before + _without_keys(match["value"], match["flag"] or match["name"])

    if text.startswith("env:"):  # not a key but the name of a variable, which need not be set here
        return text
    if _is_refused(refuse_keys, {name: text}, name):
        return _LEFT_OUT
    text = _URL.sub(lambda match: _LEFT_OUT if _is_refused(refuse_key_in_url, match[0], name) else match[0], text)
    return _NAMED.sub(part, text)


def _is_refused(check: Callable[..., None], *given: Any) -> bool:
    try:
        check(*given)
    except UserError:
        return True
    return False
