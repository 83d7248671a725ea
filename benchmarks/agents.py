"""Trains the agents of examples/agents, kills each run once, and prints what the training has gained.

    python benchmarks/agents.py [show]
    python benchmarks/agents.py run [NAME ...]

Each run is `gleanrl train examples/agents/calculator.toml` with the agent's file. Once step `KILLED_AT` is written, the
run and all its processes get SIGKILL, and the run is resumed from its last checkpoint. `run` needs the extras agent and
gguf, and the packages of ``examples/agents/requirements-NAME.txt`` and of ``models.txt``. It uses one thread
(smolagents two), and appends a JSON line to ``results/agents.jsonl`` for each agent. `show` prints the table: the share
of held-out tasks that are solved, with 95 % intervals, and what the training took, with the warm start and both
evaluations. CPU seconds are those of all processes but the episodes that were under way when the run was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "agents.jsonl"
NAMES = ("plain", "openai_agents", "langgraph_agent", "smolagents_agent")
KILLED_AT = 5
# The tool calls of smolagents are texts in a form of its own, and its prompts are three times as long. After 6 updates
# on demonstrations, it solves nothing.
MORE = {"smolagents_agent": ["--warm_start.steps", "8", "--run.threads", "2"]}


def train(name: str, folder: Path) -> dict[str, Any]:
    """Train the agent ``name`` with a kill in between, and return what `show` prints."""
    file = f"examples/agents/{name}.py"
    command = [sys.executable, "-m", "gleanrl", "train", "examples/agents/calculator.toml", "--run.folder", str(folder)]
    command += ["--environment.options.agent", f"{file}:solve"]
    if "def expert" in (ROOT / file).read_text():
        command += ["--environment.options.expert", f"{file}:expert"]
    command += MORE.get(name, [])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLEANRL_CACHE": str(folder / "cache")}
    metrics = folder / "agent" / "metrics.jsonl"
    started, cpu_before = time.monotonic(), sum(os.times()[2:4])
    with (folder / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        while not any("tokens/trained" in row and row["step"] >= KILLED_AT for row in read(metrics)):
            if first.poll() is not None:
                raise SystemExit((folder / "log").read_text()[-2000:])
            time.sleep(0.2)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        resumed = subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
        if resumed.returncode:
            raise SystemExit((folder / "log").read_text()[-2000:])
    rows = read(metrics)
    key = "eval/sampled/pass@1"
    evaluated = [[row[key], row[f"{key}_low"], row[f"{key}_high"]] for row in rows if key in row]
    trained = {row["step"]: row for row in rows if "tokens/trained" in row}
    return {
        "agent": name,
        "before": evaluated[0],
        "after": evaluated[-1],
        "steps": len(trained),
        "replayed": sum(row.get("replay/trajectories", 0) for row in trained.values()),
        "minutes": (time.monotonic() - started) / 60,
        "cpu_s": sum(os.times()[2:4]) - cpu_before,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines that are complete."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show() -> None:
    print("| agent | held-out before | after | steps | replayed trajectories | minutes | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for row in {row["agent"]: row for row in read(RESULTS)}.values():
        before, after = (f"{mean:.1%} [{low:.1%}, {high:.1%}]" for mean, low, high in (row["before"], row["after"]))
        counts = f"{row['steps']} | {row['replayed']:.0f} | {row['minutes']:.1f} | {row['cpu_s']:.0f}"
        print(f"| `{row['agent']}.py` | {before} | {after} | {counts} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("show", "run"), default="show")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all of them by default")
    args = parser.parse_args()
    if args.command == "run":
        for name in args.names or NAMES:
            with tempfile.TemporaryDirectory() as folder:
                row = train(name, Path(folder))
            with RESULTS.open("a") as out:
                out.write(json.dumps(row) + "\n")
    show()


if __name__ == "__main__":
    main()
