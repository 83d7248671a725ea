"""Tests of what a user's own loss may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gleanrl.algorithms.loss import TokenLosses, Tokens, objective, policy_loss, replay_loss
from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError

WRONG: dict[str, Callable[[Tokens], Any]] = {
    "a value for each pair of tokens": lambda tokens: -tokens.advantages[:, None] * tokens.ratio,
    "a scalar": lambda tokens: tokens.ratio.sum(),
    "too few values": lambda tokens: tokens.ratio[1:],
    "no gradient": lambda tokens: (tokens.advantages * tokens.ratio).detach(),
    "nothing": lambda tokens: None,
    "wrong flags": lambda tokens: TokenLosses(tokens.ratio, clipped_high=torch.zeros(1, dtype=torch.bool)),
}


def tokens() -> Tokens:
    values = torch.linspace(-2, -1, 6)
    off_policy = torch.arange(6) % 2 == 0
    return Tokens(values.requires_grad_(), values.detach() - 0.1, torch.ones(6), torch.arange(6) // 2, off_policy)


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("kind", ["policy", "replay"])
def test_a_loss_that_returns_something_else_is_refused_by_name(kind: str, mistake: str) -> None:
    name = f"{kind}, {mistake}"
    if kind == "policy":
        policy_loss(name)(lambda tokens, settings, mistake=mistake: WRONG[mistake](tokens))
        settings, setting = LossSettings(name=name), "loss.name"
    else:
        replay_loss(name)(lambda tokens, settings, mistake=mistake: WRONG[mistake](tokens))
        settings, setting = LossSettings(replay_mode=name), "loss.replay_mode"
    with pytest.raises(UserError, match=setting) as caught:
        objective(tokens(), settings)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["policy", "replay"])
def test_a_precompute_must_return_one_value_for_each_token(kind: str) -> None:
    register: Any = policy_loss if kind == "policy" else replay_loss
    name = f"{kind}, short precompute"
    register(name, scope="update", precompute=lambda tokens, settings: tokens.ratio[:1])(
        lambda tokens, settings: tokens.ratio
    )
    settings = LossSettings(**{"name" if kind == "policy" else "replay_mode": name})
    with pytest.raises(UserError, match="precompute"):
        objective(tokens(), settings)


def test_a_loss_without_a_gradient_is_accepted_where_none_is_asked_for() -> None:
    with torch.no_grad():
        assert objective(tokens(), LossSettings()).values.shape == (6,)


def test_a_loss_need_not_handle_that_a_correction_leaves_out_all_tokens() -> None:
    def over_all(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        return tokens.ratio.max().expand_as(tokens.logp)  # an error without tokens

    @policy_loss("over all, of a test", scope="update", precompute=over_all)
    def scaled(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        assert tokens.precomputed is not None
        return -tokens.advantages * tokens.ratio / tokens.precomputed

    logp = torch.linspace(-2, -1, 4).requires_grad_()
    old = logp.detach() - 0.1
    given = Tokens(logp, old, torch.ones(4), torch.arange(4) // 2, torch.zeros(4, dtype=torch.bool), old - 3)
    result = objective(given, LossSettings(name="over all, of a test", correction="mask", correction_cap=2.0))
    result.values.sum().backward()
    assert result.left_out_tokens == 4
    assert logp.grad is not None
    assert not logp.grad.any()


@pytest.mark.parametrize("share", ["0.001", 0.0, 2])
def test_a_share_of_tokens_that_is_none_is_refused(share: object) -> None:
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(UserError, match=r"loss\.options\.share"):
            objective(tokens(), LossSettings(name=name, options={"share": share}))
