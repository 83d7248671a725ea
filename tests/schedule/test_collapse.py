"""Tests of `CollapseWatch`: falls of success are noticed, noise is not, and good checkpoints are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gleanrl.schedule.collapse import WINDOW, CollapseWatch


def step(success: float, groups: int = 16, **metrics: float) -> dict[str, float]:
    return {"reward/success": success, "groups/consumed": float(groups), **metrics}


def play(watch: CollapseWatch, *success: float, **metrics: float) -> list[str]:
    texts = [
        watch.observe(step(value, **{name.replace("__", "/"): v for name, v in metrics.items()})) for value in success
    ]
    return [text for text in texts if text is not None]


def test_a_fall_of_success_is_reported_once_with_the_metrics_that_changed() -> None:
    watch = CollapseWatch()
    assert play(watch, 0.4, 0.6, *[0.8] * WINDOW, loss__entropy=0.4, episode__tokens=100.0) == []
    (text,) = play(watch, 0.4, 0.1, *[0.0] * 20, loss__entropy=2.0, episode__tokens=110.0)
    assert "entropy in nats 0.4 -> " in text
    assert "tokens" not in text.split("changed:")[1]
    assert watch.noticed == 1


def test_a_second_fall_is_reported_after_a_recovery_or_a_return() -> None:
    watch = CollapseWatch()
    assert len(play(watch, *[0.8] * 10, *[0.0] * 10, *[0.8] * 10, *[0.0] * 10)) == 2
    watch.returned()
    assert play(watch, *[0.0] * 9) == []
    assert len(play(watch, 0.0)) == 1  # going back has not helped
    assert (watch.noticed, watch.returns) == (3, 1)


def test_a_fall_without_another_change_says_so() -> None:
    watch = CollapseWatch()
    (text,) = play(watch, *[0.8] * WINDOW, *[0.0] * WINDOW, loss__entropy=0.4)
    assert "no other watched metric" in text


def test_few_tasks_a_small_fall_and_steps_without_scores_are_no_collapse() -> None:
    watch = CollapseWatch()
    assert play(watch, *[0.8] * 10, *[0.5] * 20) == []  # above half
    watch = CollapseWatch()
    values = [watch.observe(step(value, groups=1)) for value in (*[0.4] * 10, *[0.0] * 10)]  # ten tasks each
    assert values == [None] * 20
    watch = CollapseWatch()
    play(watch, *[0.8] * 10)
    assert [watch.observe({"groups/consumed": 0.0}) for _ in range(10)] == [None] * 10


@pytest.mark.parametrize("success", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("groups", [4, 16])
def test_noise_is_seldom_taken_for_a_collapse(success: float, groups: int) -> None:
    """Members of a group are all solved or all failed, which is the largest variance that there can be."""
    random = np.random.default_rng(round(100 * success) + groups)
    false = 0
    for _ in range(100):
        watch = CollapseWatch()
        for solved in random.binomial(groups, success, 200):
            false += watch.observe(step(solved / groups, groups)) is not None
    assert false <= 10  # in 100 runs of 200 steps


def test_a_checkpoint_is_good_if_success_stays_near_the_best_after_it() -> None:
    watch = CollapseWatch()
    found = []
    for success in (0.2, 0.4, 0.6, 0.6, 0.2, 0.2, 0.5):
        play(watch, *[success] * 5)
        watch.saved(5 * len(found) + 5)
        found.append(watch.good)
    # After 15 steps the best is the mean of 0.4 and 0.6, after 20 it is 0.6. Then success falls to a third: noticed.
    assert found == [None, 5, 10, 15, 15, 15, 15]
    assert watch.noticed == 1


def test_a_checkpoint_of_the_first_ten_steps_is_compared_with_the_steps_so_far() -> None:
    watch = CollapseWatch()
    for saved, success in ((3, 0.5), (6, 0.6), (9, 0.1)):
        play(watch, *[success] * 3)
        watch.saved(saved)
    assert watch.good == 3


def test_the_last_checkpoint_before_a_return_is_not_judged_by_the_steps_after_it() -> None:
    watch = CollapseWatch()
    for step in range(1, 26):
        text = play(watch, 0.8 if step <= 18 else 0.0)
        if text:
            watch.returned()
            break
        if step % 5 == 0:
            watch.saved(step)
    assert (watch.good, step) == (10, 23)  # step-20 was saved during the fall
    play(watch, 0.8, 0.8)
    watch.saved(25)
    assert watch.good == 10
    play(watch, *[0.8] * 5)
    watch.saved(30)
    assert watch.good == 25


def test_a_resumed_watch_continues_as_if_nothing_had_happened() -> None:
    random = np.random.default_rng(0)
    values = [*random.uniform(0.6, 0.9, 20), *random.uniform(0.0, 0.2, 20)]
    whole, first = CollapseWatch(), CollapseWatch()
    expected = [whole.observe(step(value)) for value in values]
    found = [first.observe(step(value)) for value in values[:23]]
    second = CollapseWatch()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.observe(step(value)) for value in values[23:]]
    assert found == expected
    assert any(expected)
    assert second == whole
