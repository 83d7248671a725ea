"""Tests of the embodied RolloutWorker: its rows equal those of stepping the plain Gymnasium environment by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from gleanrl.buffer import TensorTrajectory
from gleanrl.embodied.chunks import Progress
from gleanrl.embodied.environments import Chunked, Environments
from gleanrl.embodied.networks import Actor
from gleanrl.embodied.rollout import RolloutWorker, Weights
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive
from tests.embodied.world import ID, LIMIT

SEED, COUNT = 3, 3


@contextmanager
def made(chunk: int, *, id: str = ID, **options: Any) -> Iterator[Environments]:
    vectorization = options.pop("vectorization", "sync")
    environments = Environments(id, options, count=COUNT, chunk=chunk, seed=SEED, vectorization=vectorization)
    try:
        yield environments
    finally:
        environments.close()


def worker(environments: Environments, progress: list[Progress] | None = None) -> RolloutWorker:
    actor = Actor(environments.obs_size, environments.action_size, 8, 1, torch.Generator().manual_seed(0))
    found = RolloutWorker(environments, actor, chunk_steps=20, warmup=1, seed=SEED, progress=progress)
    found.load(Weights(5, {name: tensor.clone() for name, tensor in actor.state_dict().items()}))
    return found


def by_hand(b: int, actions: torch.Tensor, chunk: int) -> Iterator[dict[str, Any]]:
    """Yield the expected rows of environment ``b``, by stepping a plain environment with ``actions`` ``[T, C * A]``."""
    env = gymnasium.make(ID)
    episode = 0

    def begin() -> Any:
        return env.reset(seed=derive(derive(SEED, "environment", b), "episode", episode) % 2**31)[0]

    obs, total, length = begin(), 0.0, 0
    terminated = truncated = False
    for chosen in actions.numpy():
        row: dict[str, Any] = {"obs": obs, "rewards": [0.0] * chunk}
        row |= {name: [False] * chunk for name in ("terminations", "truncations")}
        for i, action in enumerate(chosen.reshape(chunk, 2)):
            # scaled from [-1, 1] to the bounds [-2, 2] and [0, 4]
            real = np.array([2 * action[0], 2 + 2 * action[1]], np.float32)
            obs, reward, terminated, truncated, _ = env.step(real)
            row["rewards"][i], row["terminations"][i], row["truncations"][i] = reward, terminated, truncated
            total, length = total + float(reward), length + 1
            if terminated or truncated:
                break
        row["next_obs"] = obs
        if terminated or truncated:
            row["return"], row["length"] = total, length
            episode, total, length = episode + 1, 0.0, 0
            obs = begin()
        yield row
    env.close()


def flat(obs: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([obs["at"], obs["steps"]]))


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("number", [0, 1])  # rollout 0 acts at random (warm-up), rollout 1 by the policy
def test_rows_equal_those_of_the_plain_environment(chunk: int, number: int) -> None:
    with made(chunk) as environments:
        rollout = worker(environments).collect(number)
    trajectory, ended = rollout.trajectory, []
    assert trajectory.actions is not None
    assert trajectory.actions.shape == (20, COUNT, 2 * chunk)
    assert trajectory.actions.abs().max() <= 1
    kinds = set()
    for b in range(COUNT):
        for t, row in enumerate(by_hand(b, trajectory.actions[:, b], chunk)):
            assert torch.equal(trajectory.curr_obs["states"][t, b], flat(row["obs"]))
            assert torch.equal(trajectory.next_obs["states"][t, b], flat(row["next_obs"]))
            assert torch.equal(field(trajectory, "rewards")[t, b], torch.tensor(row["rewards"], dtype=torch.float32))
            for name in ("terminations", "truncations"):
                assert field(trajectory, name)[t, b].tolist() == row[name]
                kinds |= {(name, i) for i, flag in enumerate(row[name]) if flag}
            assert (
                field(trajectory, "dones")[t, b].tolist()
                == np.logical_or(row["terminations"], row["truncations"]).tolist()
            )
            if "return" in row:
                ended.append((row["length"], row["return"]))
    if number:
        assert {name for name, _ in kinds} == {"terminations", "truncations"}  # episodes ended in both ways
        assert {i for _, i in kinds} == set(range(chunk))  # and at every position in a chunk
    assert sorted(zip(rollout.lengths, rollout.returns, strict=True)) == sorted(ended)
    assert field(trajectory, "versions").unique().tolist() == [5.0]
    assert trajectory.max_episode_length == LIMIT


def field(trajectory: TensorTrajectory, name: str) -> torch.Tensor:
    found = getattr(trajectory, name)
    assert found is not None
    return found


def test_log_probs_are_those_of_the_distribution_that_actions_were_sampled_from() -> None:
    with made(2) as environments:
        sampling = worker(environments)
        random, trajectory = sampling.collect(0).trajectory, sampling.collect(1).trajectory
    mean, std = sampling.actor(trajectory.curr_obs["states"].reshape(-1, 3))
    before = torch.atanh(field(trajectory, "actions").reshape(-1, 4).double())
    normal = torch.distributions.Normal(mean.double(), std.double())
    wanted = (normal.log_prob(before) - torch.log1p(-torch.tanh(before).square())).sum(dim=1)
    ours = field(trajectory, "prev_logprobs").reshape(-1).double()
    inside = field(trajectory, "actions").reshape(-1, 4).abs().amax(dim=1) < 0.999  # closer to 1, float32 is too coarse
    assert inside.float().mean() > 0.8
    torch.testing.assert_close(ours[inside], wanted[inside], rtol=1e-3, atol=1e-3)
    assert field(random, "prev_logprobs").unique().tolist() == pytest.approx([4 * np.log(0.5)])


def test_environments_in_processes_give_the_same_rollout_as_in_one_process() -> None:
    rollouts = []
    for vectorization in ("sync", "async"):
        with made(2, vectorization=vectorization) as environments:
            rollouts.append(worker(environments).collect(1))
    ours, theirs = (rollout.trajectory for rollout in rollouts)
    for name in ("actions", "rewards", "terminations", "truncations"):
        assert torch.equal(field(ours, name), field(theirs, name))
    assert torch.equal(ours.next_obs["states"], theirs.next_obs["states"])
    assert rollouts[0].returns == rollouts[1].returns


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_worker_continues_the_episodes_of_another_from_its_progress(vectorization: str) -> None:
    with made(2) as environments:
        sampling = worker(environments)
        between = sampling.collect(1)
        wanted = sampling.collect(2)
    with made(2, vectorization=vectorization) as environments:
        found = worker(environments, list(between.progress)).collect(2)
    assert any(len(own.actions) for own in between.progress)  # some episode is not over yet
    assert torch.equal(found.trajectory.curr_obs["states"], wanted.trajectory.curr_obs["states"])
    assert torch.equal(field(found.trajectory, "rewards"), field(wanted.trajectory, "rewards"))
    assert found.returns == wanted.returns  # also of episodes that the first worker began


def test_the_progress_of_an_endless_episode_is_kept_without_copies() -> None:
    with made(2, wide=1e9, max_episode_steps=-1) as environments:
        sampling = worker(environments)
        rollouts = [sampling.collect(number) for number in range(10)]
    for b in range(COUNT):
        actions = torch.cat([field(rollout.trajectory, "actions")[:, b] for rollout in rollouts]).numpy()
        for number, rollout in enumerate(rollouts, 1):
            assert np.array_equal(rollout.progress[b].actions, actions[: 20 * number])
        assert np.shares_memory(rollouts[-2].progress[b].actions, rollouts[-1].progress[b].actions)


def test_a_nondeterministic_environment_cannot_be_continued_and_begins_its_next_episode() -> None:
    with made(2, repeats=False) as environments:
        between = worker(environments).collect(1).progress
        with pytest.warns(UserWarning, match="not deterministic"):
            obs = environments.reset(between)
        assert all(len(own.actions) == 0 for own in environments.progress())
        assert [own.episode for own in environments.progress()] == [own.episode + 1 for own in between]
        assert obs[:, 2].tolist() == [0.0] * COUNT


def test_an_unusable_environment_is_an_error_of_one_line() -> None:
    for id, words in (("Pendulum-v99", "Pendulum"), ("CartPole-v1", "bounded Box"), ("nowhere:Thing-v0", "nowhere")):
        with pytest.raises(UserError, match=words) as error, made(1, id=id):
            pass
        assert "\n" not in str(error.value)


class Whole(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, low: int, high: int, dtype: Any) -> None:
        self.action_space = spaces.Box(low, high, (1,), dtype)
        self.taken: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(int(action[0]))
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_whole_numbers_as_actions_are_rounded_within_their_bounds() -> None:
    for low, high, dtype in ((100, 200, np.uint8), (0, 3, np.int64), (-128, 127, np.int8)):
        environment = Whole(low, high, dtype)
        wrapped = Chunked(environment, chunk=3)
        wrapped.reset(seed=0)
        wrapped.step(np.array([-1.0, 0.98, 1.0], np.float32))
        assert environment.taken[0] == low
        assert environment.taken[-1] == high
        assert high - environment.taken[1] <= 0.02 * (high - low) / 2 + 0.5
