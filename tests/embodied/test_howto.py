"""Tests of docs/howto/embodied.md: its commands are valid, its settings exist, and its code runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gleanrl.cli.main import parse_overrides
from gleanrl.config.loading import load_job
from gleanrl.embodied.settings import EmbodiedConfig

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "embodied.md").read_text()
COMMANDS = re.findall(r"^gleanrl train ((?:.*\\\n)*.*)", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_is_a_valid_embodied_configuration(command: str) -> None:
    preset, *settings = shlex.split(command.replace("\\\n", " "))
    assert isinstance(load_job(preset, parse_overrides(settings)), EmbodiedConfig)


def test_the_page_has_three_commands_and_every_setting_it_names_exists() -> None:
    assert len(COMMANDS) == 3
    named = set(re.findall(r"`(\w+)\.(\w+)(?: = [^`]*)?`", PAGE))
    sections = EmbodiedConfig.model_fields
    known = {(name, key) for name in sections for key in getattr(sections[name].annotation, "model_fields", ())}
    assert {pair for pair in named if pair[0] in sections} <= known
    assert len(named & known) > 8


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "embodied.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([16, 3]) torch.Size([16, 1])\n"


def test_every_embodied_setting_is_read_by_some_code() -> None:
    """A setting that no code reads would be accepted and silently ignored, so every name must occur in the source."""
    package = Path(__file__).parents[2] / "src" / "gleanrl"
    files = [*(package / "embodied").glob("*.py"), package / "runtime" / "embodied.py"]
    source = "\n".join(path.read_text() for path in files if path.name != "settings.py")
    source += (package / "tracking" / "monitors" / "__init__.py").read_text()
    for section, field in EmbodiedConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            if (section, key) not in {("run", "folder"), ("run", "name")}:  # read by `JobConfig.path`
                assert re.search(rf"\.{key}\b", source), f"{section}.{key}"
