"""`gleanrl.utils.registry.Registry` finds entries by name or import path, and its errors suggest corrections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry
from gleanrl.utils.text import nearest


def mix() -> None: ...


def stir() -> None: ...


@dataclass(frozen=True)
class Colour:
    name: str
    function: Callable[..., None] = mix


def colours() -> Registry[Colour]:
    registry = Registry("paint.colour", Colour, "@colour(...)")
    for name in ("red", "green"):
        registry.add(Colour(name))
    return registry


def test_an_entry_is_found_by_its_name() -> None:
    registry = colours()
    assert registry.get("red") == Colour("red")
    assert registry.names() == ("green", "red")
    assert registry.add(blue := Colour("blue")) is blue
    assert registry.get("blue") is blue


def test_an_unknown_name_raises_an_error_with_the_nearest_name_or_all_names() -> None:
    with pytest.raises(UserError, match=r"^paint\.colour: unknown value 'gren'; did you mean 'green'\?$"):
        colours().get("gren")
    with pytest.raises(UserError, match=r"^paint\.colour: unknown value 'xyz'; known are green, red$"):
        colours().get("xyz")
    assert nearest("x", [], list_all=True) == "; known are none"


def test_adding_a_second_function_under_a_taken_name_raises() -> None:
    registry = colours()
    red = registry.get("red")
    # Adding the same entry a second time is allowed and changes nothing.
    assert registry.add(red) is red
    with pytest.raises(UserError, match=r"paint\.colour 'red' is taken by .*mix; choose another name"):
        registry.add(Colour("red", stir))
    assert registry.get("red") is red


def test_adding_a_redefinition_of_the_same_function_replaces_the_entry() -> None:
    registry = colours()
    again = Colour("red", mix)
    assert registry.add(again) is again
    assert registry.get("red") is again


def test_an_import_path_finds_an_unregistered_entry_and_its_errors_name_the_fault(tmp_path: Path) -> None:
    file = tmp_path / "paints.py"
    file.write_text(f"from {__name__} import Colour\nown = Colour('own')\n\ndef plain():\n    pass\n")
    assert colours().get(f"{file}:own") == Colour("own")
    with pytest.raises(UserError, match=r"paint\.colour = '.*paints\.py:plain' is a plain function; put @colour"):
        colours().get(f"{file}:plain")
    with pytest.raises(UserError, match=r"has no 'onw'; did you mean 'own'\?"):
        colours().get(f"{file}:onw")
    with pytest.raises(UserError, match="no file"):
        colours().get(f"{tmp_path / 'missing.py'}:own")
    with pytest.raises(UserError, match=r"write `package\.module:Name` or `file\.py:Name`"):
        colours().get("file.py:")
