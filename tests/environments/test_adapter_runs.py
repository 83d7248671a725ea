"""Complete runs on environments of gymnasium and TextArena: two steps of training, then an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gleanrl.cli import main as cli

GYMNASIUM = """
name = "gymnasium"
train_tasks = 8
eval_tasks = 4
warm_start_tasks = 20
options = { id = "FrozenLake-v1", kwargs = { is_slippery = false } }
"""
TEXTARENA = """
name = "textarena"
train_tasks = 24
eval_tasks = 4
warm_start_tasks = 20
options = { env_id = "GuessTheNumber-v0" }
"""
RUN = """
run = { name = "run", steps = 2, threads = 1 }
model = { hidden_size = 32, layers = 2, max_context = 512, vocabulary = 256 }
warm_start = { demonstrations = 20, noise = 0.1, steps = 100, batch = 8, lr = 3e-3 }
context = { max_turns = 10, max_tokens_per_turn = 6 }
schedule = { batch = 2, group = 8 }
evaluation = { every = 0, samples = 1 }
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", [GYMNASIUM, TEXTARENA], ids=["gymnasium", "textarena"])
def test_a_model_is_trained_and_evaluated_on_an_adapted_environment(
    environment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium" if environment is GYMNASIUM else "textarena")
    (tmp_path / "run.toml").write_text(f"{RUN}\n[environment]\n{environment}")
    assert cli.main(["train", str(tmp_path / "run.toml"), "--run.folder", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("reward/mean" in row for row in rows) == 2
    assert any(row.get("learner/grad_norm", 0.0) > 0 for row in rows)
    assert {row["eval/sampled/valid"] for row in rows if "eval/sampled/valid" in row} == {1.0}
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    assert "success, sampled" in capsys.readouterr().out
