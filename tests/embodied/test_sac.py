"""Tests of SAC: losses, gradients and targets equal those of a float64 reference with torch's distributions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.embodied.sac import SAC, Transitions
from gleanrl.embodied.settings import LearnerSettings

GAMMA = 0.9


def perceptron(weights: list[Tensor], biases: list[Tensor], x: Tensor, scale: list[Any] | None = None) -> Tensor:
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x @ weight + bias
        if i < len(weights) - 1:
            if scale:
                x = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, correction=0) + 1e-5).sqrt()
                x = x * scale[i][0] + scale[i][1]
            x = x.clamp(min=0)
    return x


class Reference:
    """The networks of a SAC in float64; the critics are evaluated one after the other."""

    def __init__(self, sac: SAC) -> None:
        self.actor = {
            name: tensor.detach().double().requires_grad_() for name, tensor in sac.actor.state_dict().items()
        }
        state = sac.critics.state_dict()
        self.critics = {name: tensor.detach().double().requires_grad_() for name, tensor in state.items()}
        self.targets = {name: tensor.double() for name, tensor in sac.target_critics.state_dict().items()}
        self.count, self.layers = sac.settings.critics, sac.settings.layers + 1
        self.norm = sac.settings.layer_norm

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        layers = range(self.layers)
        weights = [self.actor[f"body.weights.{i}"][0] for i in layers]
        out = perceptron(weights, [self.actor[f"body.biases.{i}"][0] for i in layers], obs)
        mean, log_std = out.chunk(2, dim=1)
        return mean, log_std.clamp(-20, 2).exp()

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = self.policy(obs)
        squash = TanhTransform(cache_size=1)
        squashed = TransformedDistribution(Normal(mean, std), [squash])
        actions = squash(mean + std * noise)
        assert isinstance(actions, Tensor)
        return actions, squashed.log_prob(actions).sum(dim=1)

    def values(self, state: dict[str, Tensor], obs: Tensor, actions: Tensor) -> Tensor:
        x, layers = torch.cat([obs, actions], dim=1), range(self.layers)
        found = []
        for k in range(self.count):
            scale = (
                [(state[f"body.scales.{i}"][k], state[f"body.shifts.{i}"][k]) for i in range(self.layers - 1)]
                if self.norm
                else None
            )
            weights = [state[f"body.weights.{i}"][k] for i in layers]
            found.append(perceptron(weights, [state[f"body.biases.{i}"][k] for i in layers], x, scale)[:, 0])
        return torch.stack(found)


def transitions(n: int = 16) -> Transitions:
    random = torch.Generator().manual_seed(1)
    discounts = torch.where(torch.rand(n, generator=random) < 0.3, 0.0, 0.97)
    draw = {"obs": (n, 3), "actions": (n, 2), "rewards": (n,), "next_obs": (n, 3)}
    found = {name: torch.randn(shape, generator=random) for name, shape in draw.items()}
    return Transitions(**{**found, "actions": found["actions"].tanh()}, discounts=discounts)


def learner(*, seed: int = 4, **settings: Any) -> SAC:
    sac = SAC(3, 2, LearnerSettings(**{"hidden_size": 8, "initial_temperature": 0.3, **settings}), seed=seed)
    with torch.no_grad():
        for parameter in sac.target_critics.parameters():  # so that targets and critics differ
            parameter.add_(0.05)
    return sac


@pytest.mark.parametrize("settings", [{}, {"critics": 4, "layer_norm": True}, {"layers": 3}])
def test_losses_and_gradients_equal_the_reference(settings: dict[str, Any]) -> None:
    # The policy's loss is taken after the critics' update, which must not change them against the reference.
    sac = learner(**settings, critic_lr=1e-12)
    reference, batch = Reference(sac), transitions()
    metrics = sac.update(batch, torch.Generator().manual_seed(7))

    random = torch.Generator().manual_seed(7)
    noise = torch.randn(2, 16, 2, generator=random).double()
    chosen = torch.randperm(4, generator=random)[:2] if "critics" in settings else torch.arange(2)
    obs, actions, rewards, discounts, next_obs = (
        tensor.double() for tensor in (batch.obs, batch.actions, batch.rewards, batch.discounts, batch.next_obs)
    )
    with torch.no_grad():
        next_actions, next_logprobs = reference.sample(next_obs, noise[0])
        next_values = reference.values(reference.targets, next_obs, next_actions)[chosen].min(dim=0).values
        wanted = rewards + discounts * (next_values - 0.3 * next_logprobs)
    of_critics = sum(F.mse_loss(value, wanted) / 2 for value in reference.values(reference.critics, obs, actions))
    assert isinstance(of_critics, Tensor)
    drawn, logprobs = reference.sample(obs, noise[1])
    values = reference.values(reference.critics, obs, drawn)
    of_actor = (0.3 * logprobs - (values.min(dim=0).values if sac.settings.critics == 2 else values.mean(dim=0))).mean()
    of_temperature = -(math.log(0.3) * (logprobs.detach() - 2.0)).mean()

    assert float(metrics["loss/critic"]) == pytest.approx(of_critics.item(), rel=1e-5)
    assert float(metrics["loss/policy"]) == pytest.approx(of_actor.item(), rel=1e-5)
    assert float(metrics["sac/target"]) == pytest.approx(wanted.mean().item(), rel=1e-5)
    assert float(metrics["sac/entropy"]) == pytest.approx(-logprobs.mean().item(), rel=1e-5)
    compare(sac.critics, of_critics, reference.critics)
    compare(sac.actor, of_actor, reference.actor)
    assert sac.log_temperature.grad is not None
    assert float(sac.log_temperature.grad) == pytest.approx(of_temperature.item() / math.log(0.3), rel=1e-5)


def compare(network: torch.nn.Module, loss: Tensor, parameters: dict[str, Tensor]) -> None:
    gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    own = dict(network.named_parameters())
    for name, gradient in zip(parameters, gradients, strict=True):
        ours = own[name].grad
        assert ours is not None
        torch.testing.assert_close(ours.double(), gradient, rtol=1e-3, atol=1e-6)


def test_target_networks_move_by_tau_towards_the_critics() -> None:
    sac = learner(tau=0.25)
    before = copy.deepcopy(sac.target_critics)
    sac.update(transitions(), torch.Generator().manual_seed(0))
    both = zip(before.parameters(), sac.critics.parameters(), sac.target_critics.parameters(), strict=True)
    for old, new, found in both:
        torch.testing.assert_close(found, 0.75 * old + 0.25 * new)


def test_the_temperature_rises_if_and_only_if_entropy_is_below_its_target() -> None:
    for target, rises in ((50.0, True), (-50.0, False)):
        sac = learner(target_entropy=target)
        before = sac.log_temperature.item()
        sac.update(transitions(), torch.Generator().manual_seed(0))
        assert (sac.log_temperature.item() > before) is rises


def test_a_chunk_becomes_one_transition_with_the_discounted_rewards_up_to_its_end() -> None:
    """Four chunks of 3 steps: without an end, terminated in step 2, truncated in step 1, and both in step 3."""
    flags = torch.zeros(4, 3, dtype=torch.bool)
    terminations, truncations = flags.clone(), flags.clone()
    terminations[1, 1] = truncations[2, 0] = terminations[3, 2] = truncations[3, 2] = True
    rewards = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 99.0], [1.0, 99.0, 99.0], [1.0, 2.0, 3.0]])
    states = {"states": torch.arange(8.0).reshape(4, 2)}
    batch = {
        **{"curr_obs": states, "next_obs": states, "actions": torch.zeros(4, 6), "rewards": rewards},
        **{"terminations": terminations, "truncations": truncations},
    }
    found = Transitions.of(batch, GAMMA, torch.device("cpu"))
    whole = 1 + GAMMA * 2 + GAMMA**2 * 3
    torch.testing.assert_close(found.rewards, torch.tensor([whole, 1 + GAMMA * 2, 1.0, whole]))
    torch.testing.assert_close(found.discounts, torch.tensor([GAMMA**3, 0.0, GAMMA, 0.0]))


SETTINGS = {"actor_lr": 0.02, "critic_lr": 0.02, "temperature_lr": 0.02, "tau": 0.5, "target_entropy": 9.0}


@pytest.mark.parametrize("changed", [None, *SETTINGS])
def test_a_loaded_state_continues_with_the_learner_settings_of_the_resumed_run(changed: str | None) -> None:
    """Adam's step from one state is proportional to its learning rate, which shows the rate that is in force."""
    sac = learner()
    sac.update(transitions(), torch.Generator().manual_seed(0))
    state = copy.deepcopy(sac.state_dict())
    other = learner(seed=9, **({changed: SETTINGS[changed]} if changed else {}))
    other.load_state_dict(copy.deepcopy(state))
    for learning in (sac, other):
        learning.update(transitions(), torch.Generator().manual_seed(1))
    parts = {"actor_lr": "actor", "critic_lr": "critics", "temperature_lr": "log_temperature"}
    for setting, part in parts.items():
        before, ours, theirs = values(state[part]), values(sac.state_dict()[part]), values(other.state_dict()[part])
        if changed == setting:
            faster = SETTINGS[setting] / getattr(sac.settings, setting)
            torch.testing.assert_close(theirs - before, faster * (ours - before), rtol=1e-3, atol=1e-5)
        elif changed is None:
            assert torch.equal(ours, theirs)
    part = {"tau": "target_critics", "target_entropy": "log_temperature"}.get(changed or "")
    assert part is None or not torch.equal(values(other.state_dict()[part]), values(sac.state_dict()[part]))


def values(state: Tensor | dict[str, Tensor]) -> Tensor:
    return state.reshape(1) if isinstance(state, Tensor) else torch.cat([own.reshape(-1) for own in state.values()])


def test_sac_and_n_step_returns_of_one_chunk_step_discount_alike() -> None:
    random = torch.Generator().manual_seed(3)
    terminations, truncations = torch.rand(2, 50, 4, 3, generator=random) < 0.15
    observed = {"states": torch.randn(50, 4, 2, generator=random)}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        made = {"rewards": torch.randn(50, 4, 3, generator=random), "actions": torch.zeros(50, 4, 3)}
        flags = {"terminations": terminations, "truncations": truncations}
        buffer.add_trajectories([{**made, **flags, "curr_obs": observed, "next_obs": observed}])
        batch = buffer.sample_n_step(200, 1, GAMMA)
    found = Transitions.of(batch, GAMMA, torch.device("cpu"))
    torch.testing.assert_close(batch["n_step_rewards"], found.rewards)
    torch.testing.assert_close(batch["n_step_discounts"], found.discounts)
    assert 0 < (found.discounts == 0).sum() < 200


def test_what_an_environment_leaves_after_an_episode_has_ended_does_not_count() -> None:
    nothing = float("nan")
    batch: dict[str, Any] = {
        "rewards": torch.tensor([[1.0, 2.0, nothing]]),
        "terminations": torch.tensor([[0, 1, 0]], dtype=torch.uint8),
        "truncations": torch.zeros(1, 3, dtype=torch.uint8),
        "actions": torch.zeros(1, 3),
        "curr_obs": {"states": torch.zeros(1, 2)},
        "next_obs": {"states": torch.zeros(1, 2)},
    }
    found = Transitions.of(batch, GAMMA, torch.device("cpu"))
    assert found.rewards.tolist() == pytest.approx([1 + GAMMA * 2])
    assert found.discounts.tolist() == [0]
