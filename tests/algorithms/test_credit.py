"""Tests of `gleanrl.algorithms.advantages.estimate` that hold for all estimators: checks of the arguments, replayed and
invalid members, and estimators that users register."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.algorithms.advantages import (
    ESTIMATORS,
    Rewards,
    check_options,
    estimate,
    estimator,
    zero_variance_members,
)
from gleanrl.utils.errors import UserError

MEANS = ("grpo", "dr_grpo", "rloo", "opo")  # estimators that compare a reward with a mean of its group


def arguments(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(1.0, rows + 1)[:, None], torch.ones(rows, 1), torch.zeros(rows, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", 3.0 / (1 + 1e-6)), ("dr_grpo", 3.0), ("rloo", 3.0), ("opo", 3.0), ("gpg", 3.0)],
)
def test_the_advantage_of_a_lone_member_is_its_reward(name: str, expected: float) -> None:
    advantages, _ = estimate(name, torch.tensor([[3.0]]), torch.ones(1, 1), torch.tensor([5]))
    assert advantages.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", MEANS)
def test_replayed_members_are_compared_with_fresh_ones_and_do_not_change_them(name: str) -> None:
    fresh, group = torch.tensor([[0.0], [0.0], [1.0], [0.0]]), torch.zeros(4, dtype=torch.long)
    alone, _ = estimate(name, fresh, torch.ones(4, 1), group)
    both, _ = estimate(
        name,
        torch.cat([fresh, torch.ones(1, 1)]),
        torch.ones(5, 1),
        torch.zeros(5, dtype=torch.long),
        baseline_members=torch.tensor([True] * 4 + [False]),
    )
    torch.testing.assert_close(both[:4], alone)
    deviation = 0.5 + 1e-6 if name == "grpo" else 1.0
    assert both[4].item() == pytest.approx(0.75 / deviation, rel=1e-6)


def test_replayed_members_do_not_change_the_whitening() -> None:
    rewards, mask, group = torch.tensor([[0.0], [1.0], [1.2]]), torch.ones(3, 1), torch.zeros(3, dtype=torch.long)
    members = torch.tensor([True, True, False])
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        both, _ = estimate(name, rewards, mask, group, baseline_members=members)
        alone, _ = estimate(name, rewards[:2], mask[:2], group[:2])
        torch.testing.assert_close(both[:2], alone)
        assert both[2].item() == pytest.approx((1.2 - 0.5) / 0.5**0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
def test_graded_scores_do_not_give_a_stored_success_an_unlimited_advantage(name: str) -> None:
    """Four fresh scores have the deviation 0.005, so 1 lies 199.5 deviations above their mean, and -1 lies 200.5 below
    it. The limit is sqrt(4)."""
    rewards = torch.tensor([[0.0], [0.0], [0.0], [0.01], [1.0], [-1.0]])
    inputs = {"values": torch.zeros(6, 1)} if name == "gae" else {}
    members = torch.tensor([True] * 4 + [False] * 2)
    one_group = torch.zeros(6, dtype=torch.long)
    got, _ = estimate(name, rewards, torch.ones(6, 1), one_group, baseline_members=members, **inputs)
    assert got[4:, 0].tolist() == [2.0, 0.0 if name == "grpo_passk" else -2.0]
    inputs = {key: value[:4] for key, value in inputs.items()}
    alone, _ = estimate(name, rewards[:4], torch.ones(4, 1), one_group[:4], **inputs)
    assert torch.equal(got[:4], alone)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_a_stored_success_has_the_advantage_of_a_fresh_one_for_rewards_of_zero_and_one(size: int) -> None:
    members = torch.tensor([True] * size + [False])
    for successes in range(1, size):
        rewards = torch.tensor([[float(i < successes)] for i in range(size)] + [[1.0]])
        group = torch.zeros(size + 1, dtype=torch.long)
        got, _ = estimate("grpo", rewards, torch.ones(size + 1, 1), group, baseline_members=members)
        rate = successes / size
        expected = (1 - rate) / ((rate * (1 - rate) * size / (size - 1)) ** 0.5 + 1e-6)
        assert [got[0].item(), got[size].item()] == pytest.approx([expected] * 2, rel=1e-6)


def test_a_stored_success_among_failures_has_advantage_one() -> None:
    rewards = torch.tensor([[0.0], [0.0], [1.0]])
    members = torch.tensor([True, True, False])
    advantages, _ = estimate(
        "grpo", rewards, torch.ones(3, 1), torch.zeros(3, dtype=torch.long), baseline_members=members
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 0.0, 1.0], abs=2e-6)


@pytest.mark.parametrize("name", [*MEANS, "gpg"])
@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_stored_success_is_compared_with_a_single_fresh_member(name: str, score: float) -> None:
    advantages, _ = estimate(
        name,
        torch.tensor([[score], [1.0]]),
        torch.ones(2, 1),
        torch.zeros(2, dtype=torch.long),
        baseline_members=torch.tensor([True, False]),
    )
    assert advantages[:, 0].tolist() == pytest.approx([score, 1 - score], abs=2e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_a_group_without_a_baseline_has_no_advantage(name: str) -> None:
    """Its members have nothing to be compared with, and their raw scores say nothing about the task."""
    advantages, _ = estimate(
        name,
        torch.tensor([[0.9], [0.4], [1.0], [0.0]]),
        torch.ones(4, 1),
        torch.tensor([0, 0, 1, 1]),
        baseline_members=torch.tensor([False, False, True, True]),
    )
    assert advantages[:2, 0].tolist() == [0.0, 0.0]
    assert advantages[2, 0] > 0 > advantages[3, 0]


def test_zero_variance_drop_zeroes_only_groups_with_equal_rewards() -> None:
    rewards = torch.tensor([[2.0], [1.0], [0.0], [5.0]])
    group = torch.tensor([0, 1, 1, 2])
    kept, _ = estimate("dr_grpo", rewards, torch.ones(4, 1), group, zero_variance="drop")
    assert kept[:, 0].tolist() == [2.0, 0.5, -0.5, 5.0]  # a group of one member is kept
    flat = torch.tensor([0, 0, 1, 1]), torch.tensor([[3.0], [3.0], [0.0], [5.0]])
    for name in ("reinforce_plus_plus", "gpg"):  # advantages per token, and per trajectory
        dropped, _ = estimate(name, flat[1], torch.ones(4, 1), flat[0], zero_variance="drop")
        kept, _ = estimate(name, flat[1], torch.ones(4, 1), flat[0])
        assert not dropped[:2].any()
        assert torch.equal(dropped[2:], kept[2:])
        assert dropped[2:].any()
    assert zero_variance_members(flat[1][:, 0], flat[0]).tolist() == [True, True, False, False]
    with pytest.raises(UserError, match=r"credit\.zero_variance = 'dorp': must be keep or drop"):
        estimate("grpo", *arguments(), zero_variance="dorp")  # pyright: ignore[reportArgumentType]


def test_an_unknown_estimator_raises_an_error_that_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"credit.estimator: unknown value 'gpro'.*did you mean 'grpo'"):
        estimate("gpro", *arguments())
    with pytest.raises(UserError, match=r"credit.estimator: unknown value 'gpro'"):
        ESTIMATORS.get("gpro")


def test_an_unknown_option_raises_an_error_that_suggests_the_nearest_name() -> None:
    wrong = r"credit\.options\.gama: estimator 'gae' has no such option; did you mean 'gamma'\?"
    with pytest.raises(UserError, match=wrong):
        check_options("gae", {"lam": 1.0, "gama": 1.0})
    with pytest.raises(UserError, match=wrong):
        estimate("gae", *arguments(), gama=1.0)
    with pytest.raises(UserError, match=r"credit\.options\.gamma: estimator 'grpo' has no such option; known are none"):
        check_options("grpo", {"gamma": 1.0})
    check_options("reinforce_plus_plus", {"gamma": 1, "across_turns": True, "whiten": False})
    check_options("gpg", {"f_norm": 2.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2, 3)}, r"token_rewards \[2, 1\] and mask \[2, 3\] must both be \[N, L\]"),
        ({"token_rewards": torch.ones(2), "mask": torch.ones(2)}, r"must both be \[N, L\]"),
        ({"group": torch.zeros(3, dtype=torch.long)}, r"must be \[N\], here N = 2"),
        ({"valid": torch.ones(1)}, r"must be \[N\], here N = 2"),
        ({"baseline_members": torch.ones(2, 1)}, r"must be \[N\], here N = 2"),
        ({"token_rewards": torch.tensor([[1.0], [torch.nan]])}, "reward of valid member 1 is not finite"),
        ({"token_rewards": torch.tensor([[torch.inf], [1.0]])}, "reward of valid member 0 is not finite"),
    ],
)
def test_wrong_shapes_and_non_finite_rewards_raise_value_errors(change: dict[str, Any], message: str) -> None:
    given = dict(zip(("token_rewards", "mask", "group"), arguments(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        estimate("grpo", **given)


def test_invalid_members_may_hold_nan_and_infinite_rewards() -> None:
    rewards = torch.tensor([[torch.nan, torch.inf], [1.0, 0.0], [0.0, 0.0]])
    valid = torch.tensor([False, True, True])
    for name in sorted({"grpo_passk", "gpg", "opo", "reinforce_plus_plus", *MEANS}):
        got, _ = estimate(name, rewards, torch.ones(3, 2), torch.zeros(3, dtype=torch.long), valid=valid)
        assert got.isfinite().all()
        assert not got[0].any()


def test_a_non_finite_advantage_or_return_raises_a_value_error() -> None:
    with pytest.raises(ValueError, match="estimator 'gae' gave member 1 an advantage or return that is not finite"):
        estimate("gae", *arguments(), values=torch.tensor([[0.0], [torch.nan]]), whiten=False)


def test_advantages_and_returns_carry_no_gradient() -> None:
    values = torch.zeros(2, 1, requires_grad=True)
    advantages, returns = estimate("gae", *arguments(), values=values)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_estimators_do_not_change_their_inputs() -> None:
    rewards, values = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    mask, group = torch.ones(4, 5, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    turns = torch.tensor([[0, 0, 1, 1, 2]] * 4)
    given = (rewards, values, mask, group, turns)
    before = [x.clone() for x in given]
    built_in = [name for name in ESTIMATORS.names() if ESTIMATORS.get(name).function.__module__.startswith("gleanrl.")]
    for name in built_in:  # other tests may have registered more
        inputs = {"values": values, "reward_baselines": values[:, 0], "turns": turns, "states": turns}
        estimate(name, rewards, mask, group, **{need: inputs[need] for need in ESTIMATORS.get(name).needs})
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


OWN = """
from gleanrl.algorithms.advantages import estimator

def plain(rewards):
    return rewards.scores[:, None], rewards.scores[:, None]

@estimator("{name}", group_local=True, needs=["prices"])
def scaled(rewards, *, prices, scale=1.0):
    advantages = (rewards.token_rewards * prices).sum(-1, keepdim=True) * scale
    return advantages, advantages
"""


def test_a_users_own_estimator_is_chosen_by_its_import_path(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(name="scaled_by_price"))
    path = f"{file}:scaled"
    mask = torch.tensor([[1, 0], [1, 1]])
    rewards, prices = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([10.0, 1.0])
    got, _ = estimate(path, rewards, mask, torch.tensor([0, 0]), prices=prices, scale=2.0)
    assert got.tolist() == [[24.0, 0.0], [8.0, 8.0]]
    assert ESTIMATORS.get(path).group_local
    assert ESTIMATORS.get(path).options == {"prices", "scale"}
    assert ESTIMATORS.get("scaled_by_price") is ESTIMATORS.get(path)  # once loaded, by its name too
    with pytest.raises(ValueError, match="estimator 'scaled_by_price' needs prices"):
        estimate(path, rewards, mask, torch.tensor([0, 0]))
    with pytest.raises(UserError, match=r"credit\.options\.scael: .*has no such option; did you mean 'scale'\?"):
        check_options(path, {"scael": 1.0})
    with pytest.raises(UserError, match="plain function"):
        estimate(f"{file}:plain", *arguments())
    with pytest.raises(UserError, match=r"has no 'scalde'; did you mean 'scaled'\?"):
        check_options(f"{file}:scalde", {})


def test_an_estimator_that_returns_a_wrong_shape_raises_a_value_error() -> None:
    @estimator("of_shape_n", group_local=True)
    def of_shape_n(rewards: Rewards) -> tuple[torch.Tensor, torch.Tensor]:
        return rewards.scores, rewards.scores  # shape [N] would broadcast over the wrong axis

    with pytest.raises(ValueError, match=r"'of_shape_n' gave shape \[2\], not \[2, 1\] or \[2, 2\]"):
        estimate("of_shape_n", torch.ones(2, 2), torch.ones(2, 2), torch.tensor([0, 0]))
