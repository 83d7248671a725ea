"""The HTML report and the terminal summary of a run (`gleanrl.tracking.report`), for complete and incomplete runs.

Some tests load the page in a headless browser.
"""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rich.console

from gleanrl.runtime.records import RolloutRecord, write_rollouts
from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.tracking.report import build, build_comparison, show, transcript
from gleanrl.tracking.report.curves import MAX_POINTS, curves
from gleanrl.tracking.report.facts import facts
from gleanrl.tracking.report.gantt import MAX_ROWS, spread, windows
from gleanrl.tracking.report.rollouts import sample_rollouts
from gleanrl.types import Message, Score, StopReason, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.tracking.report.browser import assert_drawn, embedded, opened
from tests.tracking.report.synthetic import Words, make_run

HOSTILE = 'x</script><script>document.title="broken"</script><!-- <b>&amp; {{script}} \ud800 ☕'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=24)


# --- the page -----------------------------------------------------------------------------------
def test_the_page_of_a_finished_run_shows_every_section_in_a_browser(run: RunFolder, tmp_path: Path) -> None:
    document = opened(build(run), tmp_path)
    assert_drawn(document)
    headings = re.findall(r"<h2>(.*?)</h2>", document)
    assert headings == [
        "Learning",
        "Evaluation on held-out tasks",
        "Where time goes",
        "Metrics",
        "Timeline of a step",
        "Trajectories",
        "Configuration",
    ]
    assert document.count("<svg") >= 15
    assert "NaN" not in document[: document.index('id="payload"')]
    assert 'class="token"' in document


def test_a_comparison_shows_the_curves_results_and_settings_of_several_runs(run: RunFolder, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", steps=6, seed=1)
    other.config_path.write_text(other.config_path.read_text().replace("clip_high = 0.28", "clip_high = 0.2"))
    page = build_comparison([run, other], tmp_path / "both.html")
    document = opened(page, tmp_path / "profile")
    assert_drawn(document)
    assert re.findall(r"<h2>(.*?)</h2>", document) == ["Curves", "Results", "Settings that differ", "Metrics"]
    assert embedded(page)["comparison"]["settings"] == [["loss.clip_high", [0.28, 0.2]]]
    learned = document[document.index("<h2>Curves") : document.index("<h2>Results")]
    assert len(set(re.findall(r'class="curve"[^>]*stroke="([^"]+)"', learned))) == 2


@pytest.mark.parametrize("width", [400, 1200])
def test_no_chart_is_wider_than_the_window(run: RunFolder, tmp_path: Path, width: int) -> None:
    # Chromium makes no window narrower than 500 pixels, so the page is shown in a frame.
    frame = tmp_path / "frame.html"
    page = html.escape(build(run).read_text())
    frame.write_text(f'<head></head><iframe srcdoc="{page}" style="width:{width}px;height:900px"></iframe>{MEASURE}')
    document = opened(frame, tmp_path / "profile")
    root = document[: document.index("<head>")]
    right, scrolled = (float(re.search(rf'data-{name}="([\d.]+)"', root)[1]) for name in ("right", "page"))  # type: ignore[index]
    assert 0.7 * width < right <= width
    assert scrolled <= width


MEASURE = """<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const shown = frame.contentDocument;
  const rights = [...shown.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().right);
  document.documentElement.dataset.right = Math.max(...rights);
  document.documentElement.dataset.page = shown.documentElement.scrollWidth;
});
</script>"""


def test_a_run_without_metrics_still_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[run]\nsteps = 10\n")
    document = opened(build(tmp_path / "run"), tmp_path / "profile")
    assert_drawn(document)
    assert "not evaluated yet" in document


def test_the_page_escapes_hostile_text_and_needs_only_one_step_and_no_tokenizer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.metrics_path.write_text('{"step": 1, "time": 5, "reward/mean": 0.5, "loss/policy": null, "odd": -1e12}\n')
    words = Words()
    turns = (
        Turn(Message(role="user", content=HOSTILE), words("a b")),
        Turn(Message(role="assistant", content=HOSTILE), words("c"), -words("d").astype("float32"), 0),
    )
    hostile = Trajectory("a", HOSTILE, (turns, turns), Score.failed("no\x00score"), StopReason.ERROR)
    write_rollouts(folder.rollout_path(1), [RolloutRecord(1, 0, False, None, hostile)])
    page = build(folder)
    assert embedded(page)["rollouts"]["trajectories"][0]["task"].startswith("x</script>")
    document = opened(page, tmp_path / "profile")
    assert_drawn(document)
    assert "<title>run · Glean RL</title>" in document
    assert "the context was rewritten here" in document


def test_turn_rewards_are_drawn_by_turn_and_stand_at_their_turns(tmp_path: Path) -> None:
    folder, words = RunFolder(tmp_path / "run"), Words()
    folder.path.mkdir()
    rows = [{"step": step, "time": step, "turn_reward/01": 0.5, "turn_reward/02": step / 10} for step in range(1, 6)]
    folder.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompt = Turn(Message(role="user", content="go"), words("a b"))
    answers = [
        Turn(Message(role="assistant", content="x"), words("c"), -words("d").astype("float32"), 0, reward)
        for reward in (0.125, None)
    ]
    trajectory = Trajectory("a", "t", ((prompt, *answers),), Score(1.0), StopReason.DONE)
    write_rollouts(folder.rollout_path(1), [RolloutRecord(1, 0, False, None, trajectory)])
    document = opened(build(folder), tmp_path / "profile")
    assert_drawn(document)
    assert "Turn rewards" in re.findall(r"<h2>(.*?)</h2>", document)
    assert document.count("reward 0.125") == 1
    assert "reward 0.125" in transcript(trajectory)


def test_the_page_asks_nothing_of_the_network(run: RunFolder) -> None:
    page = build(run).read_text()
    outside = [u for u in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", page) if "www.w3.org/2000/svg" not in u]
    assert outside == []
    assert not re.search(r"@import|url\(|<link[^>]+href=\"(?!data:)|<script[^>]+src=", page)


def test_a_missing_run_folder_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        build(tmp_path / "nowhere")


EXERCISE = """<script>
const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });
const told = new Set();
for (const target of document.querySelectorAll("svg rect, svg g, .token")) {
  target.dispatchEvent(new MouseEvent("mousemove", { clientX: 300, clientY: 300, bubbles: true }));
  if (document.getElementById("tip").textContent) told.add(document.getElementById("tip").textContent);
}
for (const button of [...document.querySelectorAll(".toggle, .seg button, .siblings button")]) button.click();
const list = document.querySelector(".list");
const before = list.children.length;
const [step, outcome] = document.querySelectorAll(".filters select");
outcome.value = "solved";
outcome.dispatchEvent(new Event("change"));
root.dataset.filtered = before > list.children.length && !list.querySelector(".dot.failed");
root.dataset.cards = document.querySelectorAll(".multiple").length;
root.dataset.told = told.size;
</script>"""


def test_hovering_clicking_and_filtering_work_in_a_browser(run: RunFolder, tmp_path: Path) -> None:
    page = tmp_path / "exercised.html"
    page.write_text(build(run).read_text().replace("</body>", EXERCISE + "</body>"))
    document = opened(page, tmp_path / "profile")
    assert_drawn(document)
    root = document[: document.index("<head>")]
    assert 'data-filtered="true"' in root
    cards, told = (int(re.search(rf'data-{name}="(\d+)"', root)[1]) for name in ("cards", "told"))  # type: ignore[index]
    # The page shows twelve cards at first. The script has clicked "Show all metrics".
    assert cards > 20
    assert told > 50


# --- the embedded data --------------------------------------------------------------------------
def test_the_embedded_numbers_equal_those_of_the_run(run: RunFolder) -> None:
    data = embedded(build(run))
    rows = run.read_metrics()
    reward = next(curve for curve in data["curves"] if curve["name"] == "reward/mean")
    assert reward["steps"] == [row.step for row in rows if "reward/mean" in row.metrics]
    assert reward["values"] == pytest.approx([r.metrics["reward/mean"] for r in rows[1:]], rel=1e-5)
    head = data["facts"]["headline"]
    assert head["last"]["value"] == rows[-1].metrics["eval/sampled/pass@1"]
    assert head["change"] == pytest.approx(head["last"]["value"] - head["first"]["value"])
    assert [b["label"] for b in data["facts"]["baselines"]] == ["random", "expert"]
    assert data["config"]["schedule"]["preset"] == "pipelined"
    assert data["facts"]["seconds"] == pytest.approx(sum(r.metrics.get("time/step_s", 0) for r in rows))


def test_embedded_trajectories_keep_their_tokens_and_log_prob_masks(run: RunFolder) -> None:
    shown = sample_rollouts(run)
    by_id = {(t["step"], t["id"]): t for t in shown["trajectories"]}
    step = shown["trajectories"][0]["step"]
    for record in run.read_rollouts(step):
        turns = by_id[step, record.trajectory.id]["segments"][0]
        for turn, stored in zip(turns, record.trajectory.segments[0], strict=True):
            assert (turn["logprobs"] is not None) == stored.sampled
            text = "".join(shown["tokens"][i] for i in turn["ids"])
            assert stored.message["content"] in text
    assert {t["outcome"] for t in shown["trajectories"]} >= {"solved", "failed"}
    assert any(t["replayed"] for t in shown["trajectories"])


def test_embedded_trajectories_fit_a_size_limit_and_are_spread_over_the_run(run: RunFolder) -> None:
    whole = sample_rollouts(run)
    small = sample_rollouts(run, limit=60_000)
    assert 0 < len(json.dumps(small["trajectories"])) < 80_000
    assert len(small["trajectories"]) < len(whole["trajectories"])
    assert max(t["step"] for t in whole["trajectories"]) == run.rollout_steps()[-1]


def test_a_damaged_tokenizer_leaves_out_only_the_token_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder.tokenizer_path / "tokenizer.json").write_text("{")
    assert sample_rollouts(folder)["tokens"] == {}
    assert "cannot be read" in caplog.text


def test_long_curves_are_averaged_together_with_their_intervals() -> None:
    rows = [Row(i, float(i), {"x": float(i), "x_low": i - 1.0, "x_high": i + 1.0, "y_low": 3.0}) for i in range(4000)]
    found = {curve["name"]: curve for curve in curves(rows)}
    assert found.keys() == {"x", "y_low"}
    x = found["x"]
    assert len(x["values"]) <= MAX_POINTS
    assert x["values"][0] == pytest.approx(x["steps"][0])
    assert x["low"][5] == pytest.approx(x["values"][5] - 1)


def test_the_headline_uses_the_last_evaluation_and_the_mean_of_late_ones() -> None:
    name = "eval/sampled/pass@1"
    rows = [Row(i, 0.0, {name: v}) for i, v in [(0, 0.2), (5, 0.9), (10, 0.5), (15, 0.6), (20, 0.7)]]
    head = facts(rows, {})["headline"]
    assert (head["first"]["value"], head["last"]["value"]) == (0.2, 0.7)
    assert head["late_mean"] == pytest.approx(0.6)
    assert head["late_steps"] == [10, 15, 20]


def test_a_single_evaluation_has_no_change_in_the_headline() -> None:
    head = facts([Row(0, 0.0, {"eval/greedy/success": 0.2})], {})["headline"]
    assert (head["last"], head["change"], head["late_mean"]) == (None, None, None)


def test_each_kind_of_task_has_its_own_lines_below_the_overall_line() -> None:
    rows = [
        Row(i, 0.0, {"eval/greedy/success": v, "eval/kind/heat/success": v, "eval/kind/heat/pass@1": 0.1})
        for i, v in enumerate((0.2, 0.4))
    ]
    lines = facts(rows, {})["evaluation"]
    assert [line["label"] for line in lines] == ["success, greedy", "heat, sampled", "heat, greedy"]
    assert lines[2]["change"] == pytest.approx(0.2)


def test_a_measure_that_an_evaluation_lacks_is_not_shown_as_of_its_step() -> None:
    rows = [
        Row(0, 0.0, {"eval/sampled/pass@1": 0.2}),
        Row(20, 1.0, {"eval/sampled/pass@1": 0.4, "eval/sampled/pass@4": 0.5}),
    ]
    first, second = facts(rows, {})["evaluation"]
    assert "step" not in first["label"]
    assert second["label"].endswith("(step 20)")


def test_an_interval_needs_both_bounds() -> None:
    found = curves([Row(0, 0.0, {"reward/price": 1.0, "reward/price_high": 2.0})])
    assert [curve["name"] for curve in found] == ["reward/price", "reward/price_high"]


def test_a_step_that_a_resumed_run_made_again_is_shown_once() -> None:
    spans = [span("train", i, i + 1, step=i) for i in range(6)]
    spans += [span("train", 6 + i, 7 + i, step=2 + i) for i in range(5)]  # a crash, and a resume at step 2
    found = windows(spans)
    assert [(each["label"], each["start"], each["seconds"]) for each in found] == [
        *(("step 1", 0, 1), ("step 2", 1, 1), ("step 3", 6, 1), ("step 4", 7, 1)),
        *(("step 5", 8, 1), ("step 6", 9, 1), ("step 7", 10, 1)),
    ]


def test_mean_scores_are_shown_only_if_scores_are_graded() -> None:
    graded = {"eval/sampled/pass@1": 0.0, "eval/sampled/score": 0.3}
    found = facts([Row(0, 0.0, graded), Row(5, 0.0, {**graded, "eval/sampled/score": 0.4})], {})
    assert [(line["label"], line["unit"]) for line in found["evaluation"]] == [
        ("success, sampled", "rate"),
        ("mean score, sampled", "score"),
    ]
    assert found["score"]["change"] == pytest.approx(0.1)
    binary = facts([Row(0, 0.0, {"eval/sampled/pass@1": 1 - 2 / 3, "eval/sampled/score": 1 / 3})], {})
    assert [line["name"] for line in binary["evaluation"]] == ["eval/sampled/pass@1"]


def test_groups_without_variance_give_a_hint() -> None:
    few, many = ({"groups/consumed": 8.0, "groups/zero_variance": equal} for equal in (3.0, 8.0))
    assert facts([Row(1, 0.0, few)], {})["hints"] == []
    [never] = facts([Row(1, 0.0, many | {"groups/none_solved": 8.0})], {})["hints"]
    [always] = facts([Row(1, 0.0, many | {"groups/all_solved": 8.0})], {})["hints"]
    assert "never" in never
    assert "always" in always


def test_the_number_of_collapses_is_a_hint() -> None:
    collapsed = {"collapse/noticed": 1.0, "collapse/returns": 1.0}
    for count, word in ((1, "once"), (2, "2 times")):
        [text] = facts([Row(1, 0.0, {name: count * value for name, value in collapsed.items()})], {})["hints"]
        assert text.count(word) == 2


# --- timeline -----------------------------------------------------------------------------------
def span(kind: str, start: float, end: float, **tags: Any) -> dict[str, Any]:
    return {"kind": kind, "start": start, "end": end, **tags}


def test_a_timeline_window_clips_spans_to_its_step_and_busy_time_counts_overlaps_once() -> None:
    spans = [
        span("train", 6, 10, step=2),
        span("decode", 8, 12),
        span("decode", 11, 14),
        span("train", 15, 17, step=3),
        span("train", 18, 20, step=3),
        span("publish", 19, 31),
    ]
    _, window = windows(spans)
    assert (window["label"], window["start"], window["seconds"]) == ("step 4", 10, 10)
    decode, train, publish = window["lanes"]
    assert decode["busy"] == 4
    assert decode["rows"] == 2
    assert decode["spans"] == [[0, 0, 2, ""], [1, 1, 4, ""]]
    assert train["spans"] == [[0, 5, 7, ""], [0, 8, 10, ""]]
    assert publish["spans"] == [[0, 9, 10, ""]]


def test_a_timeline_window_measures_device_idle_time_and_the_part_spent_on_rewards() -> None:
    spans = [
        span("train", 0, 10, step=0),
        span("decode", 10, 12),
        span("logprobs", 11, 13),
        span("score", 11, 16),
        span("score", 15, 17, what="finish"),
        span("wait", 12, 19, who="train", what="groups"),
        span("train", 19, 20, step=1),
    ]
    _, window = windows(spans)
    assert (window["idle"], window["reward_wait"]) == (6, 4)


def test_overlapping_spans_use_at_most_max_rows_and_adjacent_tiny_spans_are_merged() -> None:
    crowd = [span("score", 0.01 * i, 5 + 0.01 * i) for i in range(100)]
    (window,) = windows([*crowd, span("train", 9, 10, step=1)])
    assert window["lanes"][0]["rows"] == MAX_ROWS
    tiny = [span("decode", i * 0.001, i * 0.001 + 0.0009) for i in range(10_000)]
    (window,) = windows([*tiny, span("train", 9.99, 10, step=1)])
    assert len(window["lanes"][0]["spans"]) == 1


def test_a_timeline_without_train_spans_is_cut_into_equal_windows() -> None:
    found = windows([span("decode", i, i + 0.5) for i in range(100)])
    assert len(found) == 10
    assert {round(w["seconds"], 2) for w in found} == {9.95}
    assert windows([]) == []


def test_spread_keeps_the_first_and_last_item() -> None:
    assert spread(list(range(100)), 5) == [0, 25, 50, 74, 99]
    assert spread([1, 2], 5) == [1, 2]


# --- the terminal -------------------------------------------------------------------------------
def test_the_summary_fits_a_narrow_terminal(run: RunFolder) -> None:
    out = io.StringIO()
    show(run, rich.console.Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[0] == "quickstart: 24 of 60 steps"
    sampled = next(line for line in lines if line.startswith("success, sampled"))
    assert re.search(r"\d\d\.\d % \[\d+\.\d, \d+\.\d\] .* \+\d\d\.\d points$", sampled.rstrip())
    assert any(line.startswith("tokens sampled:") for line in lines)
    assert lines[1].split() == ["held-out", "tasks", "step", "0", "step", "24", "change"]


def test_an_evaluation_is_listed_under_the_step_that_it_evaluated(tmp_path: Path) -> None:
    """With evaluation.at_start = false, the only evaluation of a run is the one after training."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "eval/sampled/pass@1": 0.5, "eval/baseline/expert": 1.0}\n')
    out = io.StringIO()
    show(tmp_path, rich.console.Console(file=out, width=80))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[1] == ["held-out", "tasks", "step", "20"]
    assert lines[3][-2:] == ["100.0", "%"]


@pytest.mark.parametrize("kind", ["math[hard]", "a[/b]"])
def test_the_summary_shows_the_name_of_a_kind_of_task_as_it_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "eval/sampled/pass@1": 0.5, f"eval/kind/{kind}/success": 0.25}) + "\n"
    )
    out = io.StringIO()
    show(tmp_path, rich.console.Console(file=out, width=80))
    assert kind in out.getvalue()


def test_a_transcript_contains_every_message_and_the_score(run: RunFolder) -> None:
    trajectory = next(r.trajectory for r in run.read_rollouts(3) if r.trajectory.score.value == 1.0)
    text = transcript(trajectory)
    assert text.startswith(f"task {trajectory.task_id}: score 1, ended done, sampled by version 2")
    for turn in trajectory.turns():
        assert turn.message["content"] in text
    assert "\n> go to" in text
    assert "mean log-prob -" in text


def test_the_summary_of_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    out = io.StringIO()
    show(tmp_path, rich.console.Console(file=out, width=80))
    assert "no evaluation yet" in out.getvalue()
