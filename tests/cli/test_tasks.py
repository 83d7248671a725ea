"""Tests of training a mixture of tasks by levels: its metrics, and that a killed run continues with the same tasks."""

from __future__ import annotations

import pytest

from tests.cli.conftest import CommandLine, assert_same

MIXTURE = """
[run]
steps = 6
threads = 1

[environment]
name = "mixture"
train_tasks = 24
eval_tasks = 4
warm_start_tasks = 12

[[environment.options.parts]]
name = "reasoning_gym"
label = "short"
options = { task = "spell_backward", answer = "whole", level = 0 }

[[environment.options.parts]]
name = "reasoning_gym"
label = "long"
options = { task = "spell_backward", answer = "whole", config = { min_word_len = 5, max_word_len = 6 } }

[tasks]
order = "levels"
options = { advance = 0.01, window = 2, review = 0.25 }

[model]
hidden_size = 32
layers = 2
vocabulary = 256

[warm_start]
demonstrations = 24
steps = 60

[context]
max_turns = 1

[schedule]
batch = 4
group = 4

[evaluation]
every = 3
samples = 2

[checkpoint]
every = 2
"""
UPDATE = "gleanrl.learners.engine:LocalEngine.backward"


@pytest.mark.parametrize("replay", [(), ("--replay.enabled", "true")], ids=["plain", "replay"])
def test_training_a_mixture_by_levels_continues_after_a_kill_with_the_same_tasks(
    gleanrl: CommandLine, replay: tuple[str, ...]
) -> None:
    (gleanrl.folder / "tiny.toml").write_text(MIXTURE)
    assert gleanrl.train("whole", *replay).status == 0
    whole = gleanrl.run("whole")
    rows = {row.step: row.metrics for row in whole.read_metrics()}
    assert {"eval/kind/short/spell_backward/pass@1", "eval/kind/long/spell_backward/pass@1"} <= rows[0].keys()
    levels = [rows[step]["tasks/level"] for step in range(1, 7)]
    assert levels == sorted(levels)
    assert set(levels) <= {0.0, 1.0}

    (gleanrl.folder / "runs" / "whole").rename(gleanrl.folder / "kept")
    assert gleanrl.train("whole", *replay, at=(UPDATE, 4, "SIGKILL")).status == -9
    ended = gleanrl.train("whole", *replay, "--resume")
    assert ended.status == 0, ended.stderr
    (gleanrl.folder / "kept").rename(gleanrl.folder / "runs" / "first")
    assert_same(gleanrl.run("whole"), gleanrl.run("first"))
