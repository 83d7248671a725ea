"""Loading environments by name or import path, the cache folder, and the errors for wrong names and options."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import BUILT_IN, load_taskset
from gleanrl.utils.cache import cache_dir
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object, loaded_files, restore_files

MINE = """
from gleanrl.protocols import Taskset
from gleanrl.types import Task

class Mine(Taskset):
    def __init__(self, size, *, seed, colour="red"):
        if size < 1:
            raise ValueError(f"size = {size}: at least 1")
        self.made = size, seed, colour
    def tasks(self, split, count):
        return [Task(f"{split}-{i}") for i in range(count)]
    def environment(self, task): ...

class Duck:
    def tasks(self, split, count): ...
    def environment(self, task): ...

class Half(Taskset):
    def tasks(self, split, count): ...

class Outer:
    class Inner: ...

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def load(name: str, **options: Any) -> Any:
    return load_taskset(EnvironmentSettings(name=name, options=options), seed=7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alfworld", {}),
        ("textworld", {"rooms": 5, "quest_length": 2}),
        ("reasoning_gym", {"task": "spell_backward"}),
    ],
)
def test_built_in_environments_load_by_name_and_get_the_seed(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip(BUILT_IN[name].packages[0])
    seven = pickle.dumps(load(name, **options))
    assert pickle.dumps(load(name, **options, seed=7)) == seven
    assert pickle.dumps(load(name, **options, seed=9)) != seven


def test_an_environment_whose_package_is_missing_raises_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(UserError, match=r"environment 'reasoning_gym' needs the extra: pip install 'gleanrl\[reaso"):
        load("reasoning_gym", task="spell_backward")


def test_a_user_defined_taskset_gets_its_options_and_the_seed(mine: str) -> None:
    assert load(f"{mine}:Mine", size=2).made == (2, 7, "red")
    assert load(f"{mine}:Mine", size=2, seed=1, colour="blue").made == (2, 1, "blue")


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("alfword", {}, "environment.name: no environment 'alfword'; did you mean 'alfworld'?"),
        ("chess", {}, f"no environment 'chess'; there are {', '.join(BUILT_IN)}, or give `package.mod"),
        ("{}:Mine", {"size": 1, "color": "x"}, "environment.options.color: '{}:Mine' has no such option; did you mean"),
        ("{}:Mine", {"size": 1, "q": 1}, "options.q: '{}:Mine' has no such option; it takes size, seed, colour"),
        ("{}:Mine", {}, "environment.options.size: '{}:Mine' needs it"),
        ("{}:Mine", {"size": 0}, "refuses its options {'size': 0}: size = 0: at least 1"),
        ("{}:Half", {}, "Half does not implement environment"),
        ("{}:Duck", {}, "Duck must derive from gleanrl.protocols.Taskset"),
        ("{}:number", {}, "a int, not a class that can be called"),
        ("textworld", {"rooms": 0}, "environment.options.rooms = 0: Input should be greater than or equal to 1"),
        ("textworld", {"rooms": 2, "quest_length": 3}, "rooms = 2: a quest_length of 3 needs at least as many"),
        ("textworld", {"quest_lenght": 3}, "'textworld' has no such option; did you mean 'quest_length'?"),
    ],
)
def test_bad_names_and_options_raise_a_one_line_error(mine: str, name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        load(name.replace("{}", mine), **options)
    assert told.replace("{}", mine) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_object_finds_names_attributes_and_nested_classes(mine: str) -> None:
    assert load_object("gleanrl.types:Task").__name__ == "Task"
    assert load_object("gleanrl.types:Score.failed")("x").explanation == "x"
    assert load_object(f"{mine}:Outer.Inner").__name__ == "Inner"
    assert load_object(f"{mine}:Mine") is load_object(f"{mine}:Mine")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("gleanrl.types", "write `package.module:Name` or `file.py:Name`"),
        (":Name", "write `package.module:Name`"),
        ("gleanrl.types:Taks", "gleanrl.types has no 'Taks'; did you mean 'Task'?"),
        ("gleanrl.typse:Task", "no module 'gleanrl.typse'; did you mean 'types'?"),
        ("nowhere_at_all:Task", "no module 'nowhere_at_all'"),
        ("{}/missing.py:Task", "no file {}/missing.py"),
        ("{}/needy.py:Task", "needy.py imports 'not_installed_here', not installed here"),
        ("{}/broken.py:Task", "({}/broken.py:2)"),
        ("{}/importing.py:Task", "({}/broken.py:2)"),
        ("{}/raising.py:Task", "ZeroDivisionError: division by zero ({}/raising.py:2)"),
        ("raising:Task", "ZeroDivisionError: division by zero ({}/raising.py:2)"),
        ("{}/leaving.py:Task", "SystemExit: 3 ({}/leaving.py:1)"),
        ("{}/wide.py:Task", "{}/wide.py: source code string cannot contain null bytes; is the file saved as UTF-8?"),
    ],
)
def test_bad_import_paths_raise_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, told: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "importing.py").write_text("import broken")
    (tmp_path / "needy.py").write_text("import not_installed_here")
    (tmp_path / "broken.py").write_text("\ndef x(:\n")
    (tmp_path / "raising.py").write_text("\nhalf = 1 / 0\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "wide.py").write_text("class Task: ...\n", encoding="utf-16")
    with pytest.raises(UserError) as caught:
        load_object(path.replace("{}", str(tmp_path)))
    assert told.replace("{}", str(tmp_path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_from_files_can_be_unpickled_after_restore_files(mine: str, tmp_path: Path) -> None:
    """Only the file that the object needs is imported again, not the other file that had been loaded."""
    (tmp_path / "unneeded.py").write_text("class Unneeded: ...")
    load_object(f"{tmp_path / 'unneeded.py'}:Unneeded")
    own = load_object(f"{mine}:Mine")
    packed = pickle.dumps(own)
    files = {name: file for name, file in loaded_files().items() if str(tmp_path) in file}
    assert len(files) == 2
    for name in files:
        del sys.modules[name]
    restore_files(files)
    found = pickle.loads(packed)
    assert found is not own
    assert found is load_object(f"{mine}:Mine")
    assert [Path(files[name]).name for name in files if name in sys.modules] == [Path(mine).name]


def test_unpickling_an_object_whose_file_was_deleted_raises_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "brief.py"
    file.write_text("class Brief: ...")
    packed = pickle.dumps(load_object(f"{file}:Brief"))
    files = {name: path for name, path in loaded_files().items() if path == str(file.resolve())}
    sys.modules.pop(*files)
    file.unlink()
    restore_files(files)
    with pytest.raises(UserError, match="no file"):
        pickle.loads(packed)


def test_environment_variables_set_the_cache_folder_and_an_unusable_folder_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLEANRL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, root in ((str(tmp_path / "xdg"), tmp_path / "xdg"), ("relative", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_dir("things") == root / "gleanrl" / "things"
    monkeypatch.setenv("GLEANRL_CACHE", str(tmp_path / "here"))
    file = cache_dir("things") / "one"
    file.write_bytes(b"1")
    assert (tmp_path / "here" / "things" / "one").read_bytes() == b"1"
    monkeypatch.setenv("GLEANRL_CACHE", str(file))
    with pytest.raises(UserError, match="set GLEANRL_CACHE to a folder that you can write to"):
        cache_dir("things")


def test_importing_the_environment_pool_imports_no_environment_packages_or_torch() -> None:
    heavy = "{'torch', 'textworld', 'reasoning_gym', 'alfworld'}"
    code = f"import gleanrl.environments.pool, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
