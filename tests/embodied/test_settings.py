"""Tests of the embodied configuration: impossible combinations of settings."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.runtime.embodied import check
from gleanrl.utils.errors import UserError


def config(**sections: Any) -> EmbodiedConfig:
    """A configuration with 20 chunk steps per trajectory and 16 per batch, changed by ``sections``."""
    own = {"environment": {"count": 2}, "schedule": {"chunk_steps": 10}, "learner": {"batch": 16}}
    return EmbodiedConfig.model_validate({key: {**own.get(key, {}), **sections.get(key, {})} for key in own | sections})


EXPERT = {"expert": "pendulum", "chunk_steps": 30}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"buffer": {"window": 1}, "learner": {"batch": 21}}, "buffer.window = 1 trajectories hold 20 .* takes 21 "),
        ({"buffer": {"window": 1}, "learner": {"batch": 20}}, None),
        ({"buffer": {"window": 2}, "learner": {"batch": 40}}, None),
        ({"buffer": {"max_rows": 39}, "learner": {"batch": 21}}, "max_rows = 39 keeps .* 20 of them, .* takes 21 "),
        ({"buffer": {"max_rows": 40}, "learner": {"batch": 40}}, None),
        ({"buffer": {"max_rows": 15}}, None),  # the newest trajectory is never dropped
        ({"buffer": {"window": 1}, "learner": {"batch": 40}, "demonstrations": EXPERT}, None),
        ({"buffer": {"window": 1}, "learner": {"batch": 42}, "demonstrations": EXPERT}, "window = 1 .* takes 21 "),
        ({"learner": {"batch": 122}, "demonstrations": EXPERT}, "chunk_steps = 30 give 60 chunk steps, .* takes 61 "),
        ({"learner": {"batch": 120}, "demonstrations": EXPERT}, None),
        ({"learner": {"batch": 82}, "demonstrations": {**EXPERT, "newest": 2}}, "newest = 2 give 40 .* takes 41 "),
        ({"learner": {"batch": 80}, "demonstrations": {**EXPERT, "newest": 2}}, None),
        ({"learner": {"batch": 122}, "demonstrations": {**EXPERT, "newest": 9}}, "chunk_steps = 30 give 60 .* 61 "),
    ],
)
def test_a_buffer_or_window_that_can_never_fill_a_batch_is_refused(sections: dict[str, Any], words: str | None) -> None:
    if words is None:
        check(config(**sections))
    else:
        with pytest.raises(UserError, match=words):
            check(config(**sections))
