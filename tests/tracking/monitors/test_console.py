"""The console says what happens, how far it is and how long it takes, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
import rich.console

from gleanrl.tracking.monitors.console import Console, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Console(rich.console.Console(file=out, width=60), interval_s=10, clock=clock), out, clock


def test_a_log_gets_plain_lines_at_most_every_interval() -> None:
    console, out, clock = plain()
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


def test_a_log_gets_one_line_a_step_with_the_metrics_that_are_there() -> None:
    console, out, _ = plain()
    console.log(3, {"reward/mean": 0.53125, "reward/success": 0.5, "sampler/tokens_per_s": 5210.4, "loss/odd": 1.0})
    console.log(4, {"groups/zero_variance": 2.0})
    assert out.getvalue() == "step 3: reward 0.531 · success 0.5 · tokens/s 5,210\n"


def test_turns_that_are_mostly_cut_off_are_told_of_once() -> None:
    console, out, _ = plain()
    for step, share in enumerate((0.5, 0.75, 0.9), start=1):
        console.log(step, {"episode/cut_turns": share})
    assert out.getvalue() == (
        "step 2: 75 % of the turns were cut off, by context.max_tokens_per_turn or a full context (model.max_context)\n"
    )


def test_stages_nest() -> None:
    console, out, clock = plain()
    with console.stage("training", 2) as training:
        with console.stage("evaluation", 8) as evaluation:
            evaluation.advance(8)
        console.log(1, {"reward/mean": 0.25})
        clock.now += 90
        training.advance()
    assert out.getvalue().splitlines()[-1] == "training: 1/2 in 1 min 30 s · reward 0.25"


def test_what_a_resumed_run_had_done_before_says_nothing_about_its_speed() -> None:
    console, out, clock = plain()
    with console.stage("training", 100, done=90) as training:
        clock.now += 20
        training.advance(2)
        assert out.getvalue().splitlines() == ["training: 10 to do", "training: 92/100, 1 min 20 s left"]


def test_metrics_belong_to_training_although_an_evaluation_runs_beside_it() -> None:
    console, out, _ = plain()
    with console.stage("training", 2), console.stage("evaluating step 0", 8):
        console.log(1, {"reward/mean": 0.5})
    assert "training: 0/2 in 0.0 s · reward 0.5" in out.getvalue().splitlines()
    assert "evaluating step 0: 0/8 in 0.0 s" in out.getvalue().splitlines()


def test_an_interrupted_stage_says_how_far_it_came() -> None:
    console, out, _ = plain()

    def interrupted() -> None:
        with console.stage("warm start", 10) as stage:
            stage.advance(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.getvalue().splitlines()[-1] == "warm start: 3/10 stopped after 0.0 s"
    console.close()
    assert out.getvalue().count("warm start") == 2


def test_a_terminal_gets_bars_and_keeps_one_line_a_stage() -> None:
    out, clock = io.StringIO(), Clock()
    terminal = rich.console.Console(file=out, force_terminal=True, width=160, legacy_windows=False)
    console = Console(terminal, clock=clock)
    with console.stage("training", 4) as training:
        training.advance(1, reward=0.5)
        console.log(1, {"eval/sampled/pass@1": 0.25})
        console.log(2, {"reward/mean": 0.75})
        assert console.bars is not None
        console.bars.refresh()  # a real one does ten times a second
    text = out.getvalue()
    assert "1/4" in text
    assert "reward 0.75" in text
    assert "step 1: held-out 0.25" in text
    assert "step 2" not in text  # on a terminal only evaluations scroll by; the rest is in the bar
    assert "training: 1/4 in 0.0 s" in text
    assert console.bars is None


def test_markup_in_a_name_is_only_text() -> None:
    console, out, _ = plain()
    with console.stage("task [bold]x[/bold]"):
        pass
    assert out.getvalue().splitlines()[0] == "task [bold]x[/bold] ..."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.7, "1 min 00 s"), (200, "3 min 20 s"), (7530, "2 h 05 min")],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text
