"""What fits and what does not, where that depends on more than one section."""

from __future__ import annotations

import pytest

from gleanrl import config as configuration
from gleanrl.errors import UserError
from gleanrl.runtime import algorithm

PIPELINED = ("pipelined", "pipelined_one_step_off", "bounded_async")


def load(**settings: str) -> configuration.Config:
    return configuration.load("quickstart", [(name.replace("__", "."), value) for name, value in settings.items()])


@pytest.mark.parametrize("wants", [{"credit__estimator": "reinforce_plus_plus"}, {"loss__name": "clip_cov"}])
@pytest.mark.parametrize("preset", PIPELINED)
def test_what_needs_a_whole_batch_is_refused_in_chunks_and_only_there(preset: str, wants: dict[str, str]) -> None:
    algorithm.check(load(schedule__preset=preset, schedule__chunks="1", **wants))
    with pytest.raises(UserError, match=r"use sync or one_step_off, or schedule\.chunks = 1"):
        algorithm.check(load(schedule__preset=preset, schedule__chunks="2", **wants))
    for whole in ("sync", "one_step_off"):
        algorithm.check(load(schedule__preset=whole, schedule__chunks="2", **wants))


@pytest.mark.parametrize("old", ["recompute", "loglinear"])
def test_decoupled_ppo_without_its_weight_is_told(old: str) -> None:
    stale = {"schedule__preset": "one_step_off", "learner__old_logprobs": old}
    [line] = algorithm.warnings(load(**stale))
    assert f"learner.old_logprobs = '{old}'" in line
    assert "loss.correction = 'mask'" in line
    assert "\n" not in line
    fine = [
        {**stale, "loss__correction": "mask"},
        {**stale, "loss__name": "reinforce"},
        {**stale, "learner__old_logprobs": "sampler"},
        {**stale, "schedule__preset": "pipelined"},
        {},
    ]
    for settings in fine:
        assert algorithm.warnings(load(**settings)) == []
