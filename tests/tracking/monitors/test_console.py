"""The console monitor prints stages, progress, remaining time and metrics, as log lines or as bars on a terminal."""

from __future__ import annotations

import io
import re

import pytest
import rich.console

from gleanrl.tracking.monitors.console import SHOWN, Console, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def log_console() -> tuple[Console, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Console(rich.console.Console(file=out, width=60), interval_s=10, clock=clock), out, clock


def test_in_a_log_progress_lines_are_printed_at_most_once_per_interval() -> None:
    console, out, clock = log_console()
    with console.stage("making households", 100) as stage:
        for _ in range(100):
            clock.now += 0.25
            stage.advance(1, rate=4.0)
    assert out.getvalue().splitlines() == [
        "making households: 100 to do",
        "making households: 40/100, 15 s left · rate 4",
        "making households: 80/100, 5.0 s left · rate 4",
        "making households: 100/100 in 25 s · rate 4",
    ]


def test_in_a_log_each_step_is_one_line_of_the_known_metrics() -> None:
    console, out, _ = log_console()
    console.log(3, {"reward/mean": 0.53125, "reward/success": 0.5, "sampler/tokens_per_s": 5210.4, "loss/odd": 1.0})
    console.log(4, {"groups/zero_variance": 2.0})
    assert out.getvalue() == "step 3: reward 0.531 · success 0.5 · tokens/s 5,210\n"


def test_a_large_share_of_cut_off_turns_is_reported_once() -> None:
    console, out, _ = log_console()
    for step, share in enumerate((0.5, 0.75, 0.9), start=1):
        console.log(step, {"episode/cut_turns": share})
    assert out.getvalue() == (
        "step 2: 75 % of the turns were cut off, by context.max_tokens_per_turn or a full context (model.max_context)\n"
    )


def test_a_stage_inside_another_keeps_the_outer_stage_open() -> None:
    console, out, clock = log_console()
    with console.stage("training", 2) as training:
        with console.stage("evaluation", 8) as evaluation:
            evaluation.advance(8)
        console.log(1, {"reward/mean": 0.25})
        clock.now += 90
        training.advance()
    assert out.getvalue().splitlines()[-1] == "training: 1/2 in 1 min 30 s · reward 0.25"


def test_the_remaining_time_of_a_resumed_run_ignores_the_steps_done_before() -> None:
    console, out, clock = log_console()
    with console.stage("training", 100, done=90) as training:
        clock.now += 20
        training.advance(2)
        assert out.getvalue().splitlines() == ["training: 10 to do", "training: 92/100, 1 min 20 s left"]


def test_the_first_of_parts_that_run_at_the_same_time_give_no_remaining_time() -> None:
    console, out, clock = log_console()
    with console.stage("evaluating", 48, at_once=32) as stage:
        for done in (1, 31, 8):
            clock.now += 20
            stage.advance(done)
    assert out.getvalue().splitlines()[1:3] == ["evaluating: 1/48", "evaluating: 32/48, 20 s left"]


def test_metrics_are_shown_on_the_training_stage_while_an_evaluation_runs() -> None:
    console, out, _ = log_console()
    with console.stage("training", 2), console.stage("evaluating step 0", 8):
        console.log(1, {"reward/mean": 0.5})
    assert "training: 0/2 in 0.0 s · reward 0.5" in out.getvalue().splitlines()
    assert "evaluating step 0: 0/8 in 0.0 s" in out.getvalue().splitlines()


def test_an_interrupted_stage_prints_how_much_was_done() -> None:
    console, out, _ = log_console()

    def interrupted() -> None:
        with console.stage("warm start", 10) as stage:
            stage.advance(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.getvalue().splitlines()[-1] == "warm start: 3/10 stopped after 0.0 s"
    console.close()
    assert out.getvalue().count("warm start") == 2


def test_on_a_terminal_progress_is_a_bar_and_a_finished_stage_leaves_one_line() -> None:
    out, clock = io.StringIO(), Clock()
    terminal = rich.console.Console(file=out, force_terminal=True, width=160, legacy_windows=False)
    console = Console(terminal, clock=clock)
    with console.stage("training", 4) as training:
        training.advance(1, reward=0.5)
        console.log(1, {"eval/sampled/pass@1": 0.25})
        console.log(2, {"reward/mean": 0.75})
        assert console.bars is not None
        # On a real terminal, rich refreshes the bars ten times per second.
        console.bars.refresh()
    text = out.getvalue()
    assert "1/4" in text
    assert "reward 0.75" in text
    assert "step 1: held-out 0.25" in text
    # On a terminal, only evaluation metrics are printed as lines. All other metrics are shown in the bar.
    assert "step 2" not in text
    assert "training: 1/4 in 0.0 s" in text
    assert console.bars is None


def test_rich_markup_in_a_stage_name_is_printed_literally() -> None:
    console, out, _ = log_console()
    with console.stage("task [bold]x[/bold]"):
        pass
    assert out.getvalue().splitlines()[0] == "task [bold]x[/bold] ..."


def test_groups_without_variance_are_reported_once() -> None:
    console, out, _ = log_console()
    for step, equal in enumerate((4.0, 1.0, 4.0, 4.0, 3.0), start=1):
        console.log(step, {"groups/consumed": 4.0, "groups/zero_variance": equal, "groups/none_solved": equal})
    [line] = out.getvalue().splitlines()
    assert line.startswith("step 3: in the last 3 steps, 9 of 12 groups")


def test_the_mean_held_out_score_is_printed_if_it_is_not_the_success_rate() -> None:
    console, out, _ = log_console()
    console.log(1, {"eval/sampled/pass@1": 0.0, "eval/sampled/score": 0.25})
    console.log(2, {"eval/sampled/pass@1": 0.5, "eval/sampled/score": 0.5})
    assert out.getvalue().splitlines() == ["step 1: held-out 0 · held-out score 0.25", "step 2: held-out 0.5"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_bar_count_time_left_and_metrics_fit_the_terminal(width: int) -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(rich.console.Console(file=out, force_terminal=True, width=width, no_color=True), clock=clock)
    with console.stage("training", 100) as training, console.stage("evaluating step 20", 320):
        training.advance(20)
        console.log(20, dict.fromkeys(SHOWN, 0.123456) | {"eval/sampled/score": 0.5, "sampler/tokens_per_s": 12345.0})
        assert console.bars is not None
        out.seek(0)
        out.truncate()
        console.bars.refresh()
        lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in out.getvalue().splitlines()]
    bar = next(line for line in lines if " 20/100 " in line)
    assert "━" in bar
    assert re.search(r"\d:\d\d:\d\d|-:--:--", bar)
    assert any("reward 0.123" in line for line in lines)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.7, "1 min 00 s"), (200, "3 min 20 s"), (7530, "2 h 05 min")],
)
def test_duration_formats_seconds_minutes_and_hours(seconds: float, text: str) -> None:
    assert duration(seconds) == text
