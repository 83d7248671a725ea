"""Tests of `gleanrl.algorithms.batch` and `gleanrl.algorithms.microbatch`: groups become samples and padded
micro-batches that hold every trained token of the valid members exactly once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.algorithms.advantages import Rewards, estimate, estimator
from gleanrl.algorithms.batch import Batch, ModelEstimates, assign_advantages, build, build_samples, turn_states
from gleanrl.algorithms.loss import AGGREGATIONS
from gleanrl.algorithms.microbatch import MAX_PADDING, micro_batches, plan
from gleanrl.config.settings import CreditSettings, LossSettings, ReplaySettings
from gleanrl.types import TURN_ORDER, Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn, segment_arrays
from gleanrl.utils.errors import UserError
from tests.builders import Member, make_group, random_groups
from tests.strategies import examples

SEEDS = st.integers(0, 2**32 - 1)


def build_default(groups: list[Group], **loss: object) -> Batch:
    return build(groups, CreditSettings(), LossSettings.model_validate(loss), 256)


@settings(max_examples=examples(50))
@given(seed=SEEDS)
def test_samples_are_the_segments_of_valid_members_up_to_the_last_trained_token(seed: int) -> None:
    groups = random_groups(np.random.default_rng(seed))
    batch = build_default(groups)
    assert batch.groups == len(groups)
    for part, group in zip(batch.parts, groups, strict=True):
        valid = [t for t in group.trajectories if t.score.valid]
        assert part.invalid == len(group.trajectories) - len(valid)
        assert part.tokens == sum(t.sampled_tokens for t in valid)
        assert part.sequences == len(valid)
        segments = [segment for t in valid for segment in t.segments]
        assert len(part.samples) == len(segments)
        for sample, segment in zip(part.samples, segments, strict=True):
            tokens, mask, logprobs = segment_arrays(segment)
            end = sample.tokens.size
            assert sample.mask[-1]
            assert not mask[end:].any()
            for got, wanted in ((sample.tokens, tokens), (sample.mask, mask), (sample.behaviour, logprobs)):
                np.testing.assert_array_equal(got, wanted[:end])
            assert sample.old is sample.behaviour


@settings(max_examples=examples(50))
@given(seed=SEEDS, estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_every_segment_has_the_advantage_of_its_trajectory(seed: int, estimator: str) -> None:
    groups = random_groups(np.random.default_rng(seed))
    batch = build(groups, CreditSettings(estimator=estimator), LossSettings(), 256)
    for part, group in zip(batch.parts, groups, strict=True):
        valid = [t for t in group.trajectories if t.score.valid]
        if not valid:
            continue
        fresh = [t in group.fresh for t in valid]
        expected, _ = estimate(
            estimator,
            torch.tensor([[t.score.value] for t in valid]),
            torch.ones(len(valid), 1),
            torch.zeros(len(valid), dtype=torch.long),
            baseline_members=torch.tensor(fresh),
        )
        first = min((sample.trajectory for sample in part.samples), default=0)
        for sample in part.samples:
            member = sample.trajectory - first
            assert (sample.advantages[sample.mask] == np.float32(expected[member].item())).all()
            assert not sample.advantages[~sample.mask].any()
            assert sample.off_policy == (not fresh[member])


@pytest.mark.parametrize("estimator", ["gae", "grpo", "reinforce_plus_plus", "gigpo"])
def test_a_batch_in_which_the_model_has_sampled_nothing_is_empty(estimator: str) -> None:
    """Agents may never call the model, and a first prompt may fill the whole context."""
    members = tuple(Trajectory(str(i), "0", (), Score(float(i)), StopReason.DONE) for i in range(2))
    groups = [Group(GroupSpec(Task("0"), 2), members, 0)]
    built = build_samples(groups, 256)
    batch = assign_advantages(built, CreditSettings(estimator=estimator), LossSettings(), 256, [])
    assert batch.groups == 1
    assert not batch.samples
    assert (batch.parts[0].tokens, batch.parts[0].invalid) == (0, 0)


@settings(max_examples=examples(40))
@given(seed=SEEDS, mode=st.sampled_from(AGGREGATIONS))
def test_aggregation_weights_count_a_trajectory_as_one_sequence(seed: int, mode: str) -> None:
    batch = build_default(random_groups(np.random.default_rng(seed)), aggregation=mode)
    trained: dict[int, int] = {}
    for sample in batch.samples:
        trained[sample.trajectory] = trained.get(sample.trajectory, 0) + int(sample.mask.sum())
    for sample in batch.samples:
        weight = {"seq-mean-token-mean": 1 / trained[sample.trajectory], "seq-mean-token-sum-norm": 1 / 256}.get(
            mode, 1
        )
        np.testing.assert_allclose(sample.weights, np.where(sample.mask, weight, 0), rtol=1e-6)


def merged(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, segments=(tuple(trajectory.turns()),))


def token_rewards(groups: list[Group]) -> list[list[float]]:
    """Return the rewards of each trajectory's trained tokens: without discounting, their sums from each token on."""
    credit = CreditSettings(estimator="reinforce_plus_plus", options={"gamma": 0.0, "whiten": False})
    rewards: dict[int, list[float]] = {}
    for sample in build(groups, credit, LossSettings(), 1024).samples:
        rewards.setdefault(sample.trajectory, []).extend(sample.advantages[sample.mask].tolist())
    return [rewards[index] for index in sorted(rewards)]


@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_token_rewards_sum_to_the_score_whatever_the_segments(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups: list[Group] = []
    for group in random_groups(random):
        earned = []
        for t in group.trajectories:
            segments = [
                [turn.earned(random.normal()) if turn.sampled and random.random() < 0.7 else turn for turn in segment]
                for segment in t.segments
            ]
            earned.append(replace(t, segments=tuple(map(tuple, segments))))
        groups.append(replace(group, trajectories=tuple(earned)))
    valid = [t for group in groups for t in group.trajectories if t.score.valid]
    found = token_rewards(groups)
    for trajectory, rewards in zip(valid, found, strict=True):
        expected = np.zeros(len(rewards))
        ends = np.cumsum([turn.tokens.size for turn in trajectory.sampled_turns()]) - 1
        expected[ends] = [turn.reward or 0.0 for turn in trajectory.sampled_turns()]
        expected[-1] += trajectory.score.value - expected.sum()
        np.testing.assert_allclose(rewards, expected, atol=1e-6)
        np.testing.assert_allclose(sum(rewards), trajectory.score.value, atol=1e-5)
    one_segment = [replace(group, trajectories=tuple(map(merged, group.trajectories))) for group in groups]
    assert token_rewards(one_segment) == found

    # Estimators with one advantage per trajectory read nothing but the score.
    plain = [
        replace(
            group,
            trajectories=tuple(
                replace(t, segments=tuple(tuple(replace(turn, reward=None) for turn in s) for s in t.segments))
                for t in group.trajectories
            ),
        )
        for group in groups
    ]
    for with_turns, without in zip(build_default(groups).samples, build_default(plain).samples, strict=True):
        np.testing.assert_array_equal(with_turns.advantages, without.advantages)


def test_advantages_from_turn_rewards_equal_those_worked_out_by_hand() -> None:
    # Turns of 2, 1 and 2 tokens in two segments earn 0.5, nothing and 1; the score is 2, so 0.5 more at the last token.
    # The token rewards are 0 0.5 | 0 | 0 1.5. The other trajectory has one turn, no turn reward and the score -1: 0 -1.
    group = make_group(0, [Member(2.0, (2, 1, 2), segments=2), Member(-1.0, (2,))], np.random.default_rng(0))
    earning, other = group.trajectories
    given = iter([0.5, None, 1.0])
    segments = tuple(
        tuple(replace(turn, reward=next(given)) if turn.sampled else turn for turn in segment)
        for segment in earning.segments
    )
    greedy = replace(other, score=Score(0.25))
    groups = [replace(group, trajectories=(replace(earning, segments=segments), other), greedy=greedy)]
    built = build_samples(groups, 256)
    values = iter([[1.0, 1.0, 0.0], [2.0, 1.0], [0.0, 0.0]])  # of the trained tokens of each sample
    estimates = [ModelEstimates(values=np.zeros(sample.mask.size, np.float32)) for sample in built.samples]
    for sample, known in zip(built.samples, estimates, strict=True):
        assert known.values is not None
        known.values[sample.mask] = next(values)

    def advantages(estimator: str, **options: float | bool) -> list[float]:
        credit = CreditSettings(estimator=estimator, options=options)
        batch = assign_advantages(built, credit, LossSettings(), 256, estimates)
        return np.concatenate([sample.advantages[sample.mask] for sample in batch.samples]).tolist()

    by_hand = {
        # What is earned from a token on, minus the greedy 0.25.
        "remax": [2 - 0.25, 2 - 0.25, 1.5 - 0.25, 1.5 - 0.25, 1.5 - 0.25, -1 - 0.25, -1 - 0.25],
        # From the last token back: 1.5, half of that 0.75, 0.375, 0.5 + 0.375 / 2 = 0.6875, 0.34375; and -1, -0.5.
        "reinforce_plus_plus": [0.34375, 0.6875, 0.375, 0.75, 1.5, -0.5, -1.0],
        # r + V_next / 2 - V is -0.5 -0.5 1 -1.5 0.5 and 0 -1; each adds a quarter of the advantage after it.
        "gae": [-0.583984375, -0.3359375, 0.65625, -1.375, 0.5, -0.25, -1.0],
    }
    assert advantages("remax") == pytest.approx(by_hand["remax"], abs=1e-6)
    discounted = {"gamma": 0.5, "whiten": False}
    assert advantages("reinforce_plus_plus", **discounted) == pytest.approx(by_hand["reinforce_plus_plus"], abs=1e-6)
    assert advantages("gae", lam=0.5, **discounted) == pytest.approx(by_hand["gae"], abs=1e-6)
    # Whitened: the mean of the seven tokens is 2.15625 / 7, and their squares around it sum to 4.079521...
    mean = 2.15625 / 7
    squares = sum((value - mean) ** 2 for value in by_hand["reinforce_plus_plus"])
    whitened = [(value - mean) / (squares / 6 + 1e-8) ** 0.5 for value in by_hand["reinforce_plus_plus"]]
    assert advantages("reinforce_plus_plus", gamma=0.5) == pytest.approx(whitened, abs=1e-6)


def conversation(name: str, said: list[tuple[str, str | None]], score: float) -> Trajectory:
    """A trajectory of one segment: for each turn, the observation before it and the state key of the environment."""
    segment: list[Turn] = []
    for number, (observed, state) in enumerate(said):
        segment.append(Turn({"role": "user", "content": observed}, np.array([1, 2], np.int32)))
        tokens, logprobs = np.array([3, 4], np.int32), np.zeros(2, np.float32)
        segment.append(Turn({"role": "assistant", "content": str(number)}, tokens, logprobs, 0, state=state))
    return Trajectory(name, "task", (tuple(segment),), Score(score), StopReason.DONE)


def test_turn_level_credit_compares_turns_after_the_same_observation() -> None:
    # Both begin alike and meet "b" as the second or third observation, so "b" has the returns 1 and 0.
    won = conversation("won", [("a", None), ("b", None)], 1.0)
    lost = conversation("lost", [("a", None), ("c", None), ("b", None)], 0.0)
    group = Group(GroupSpec(Task("task"), fresh=2), (won, lost), ticket=0)
    options: dict[str, Any] = {"gamma": 0.5, "normalize": False}

    def advantages(group: Group) -> list[list[float]]:
        batch = build([group], CreditSettings(estimator="gigpo", options=options), LossSettings(), 64)
        return [sample.advantages[sample.mask][::2].tolist() for sample in batch.samples]

    # episode: 0.5 and -0.5; "a": returns 0.5 and 0; "b": 1 and 0; "c": one turn only
    assert advantages(group) == [[0.5 + 0.25, 0.5 + 0.5], [-0.5 - 0.25, -0.5, -0.5 - 0.5]]
    # The key of the environment wins over the text: here both texts "b" are different states, and "c" is "b" of won.
    won = conversation("won", [("a", "start"), ("b", "x")], 1.0)
    lost = conversation("lost", [("a", "start"), ("c", "x"), ("b", "y")], 0.0)
    group = Group(GroupSpec(Task("task"), fresh=2), (won, lost), ticket=0)
    assert advantages(group) == [[0.5 + 0.25, 0.5 + 0.5], [-0.5 - 0.25, -0.5 - 0.5, -0.5]]
    # Without another member in any of its states, only the episode counts.
    lost = conversation("lost", [("a", "other")], 0.0)
    group = Group(GroupSpec(Task("task"), fresh=2), (won, lost), ticket=0)
    assert advantages(group) == [[0.5, 0.5], [-0.5]]


def test_equal_scores_have_no_advantage_whether_or_not_turns_have_rewards() -> None:
    members = []
    for name, reward in (("a", None), ("b", None), ("c", 10.1), ("d", 10.1)):
        plain = conversation(name, [(f"{name}{n}", None) for n in range(10)], 101.0)
        turns = [replace(turn, reward=reward) if turn.sampled else turn for turn in plain.segments[0]]
        members.append(replace(plain, segments=(tuple(turns),)))
    group = Group(GroupSpec(Task("task"), fresh=4), tuple(members), ticket=0)
    batch = build([group], CreditSettings(estimator="gigpo", options={"weight": 0.0}), LossSettings(), 64)
    first = [sample.advantages[sample.mask][0] for sample in batch.samples]
    np.testing.assert_allclose(first, 0.0, atol=1e-6)


def test_a_stored_success_keeps_its_distance_to_scores_that_are_equal_up_to_rounding() -> None:
    """The rewards of one member's turns add up to its score, 0, up to the last bit."""
    fresh = [conversation(f"fresh {n}", [(f"{n} {k}", None) for k in range(3)], 0.0) for n in range(8)]
    turns = [replace(turn, reward=0.1) if turn.sampled else turn for turn in fresh[0].segments[0]]
    fresh[0] = replace(fresh[0], segments=(tuple(turns),))
    stored = conversation("stored", [("other", None)], 1.0)
    group = Group(GroupSpec(Task("task"), fresh=8, replayed=(stored,)), (*fresh, stored), ticket=0)
    for weight in (0.0, 1.0):
        batch = build([group], CreditSettings(estimator="gigpo", options={"weight": weight}), LossSettings(), 64)
        np.testing.assert_allclose(batch.samples[-1].advantages[batch.samples[-1].mask], 1.0, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["gigpo", "state_gae"])
def test_a_member_without_states_is_compared_by_text_with_members_that_have_them(estimator: str) -> None:
    """A success that was stored before its environment gave states."""

    def advantages(state: str | None) -> list[list[float]]:
        said = [("a", state), ("b", state and state + "b")]
        fresh = [conversation(f"fresh {n}", said, 0.0) for n in range(3)]
        stored = conversation("stored", [("a", None), ("b", None)], 1.0)
        group = Group(GroupSpec(Task("task"), fresh=3, replayed=(stored,)), (*fresh, stored), ticket=0)
        batch = build([group], CreditSettings(estimator=estimator), LossSettings(), 64)
        return [sample.advantages[sample.mask].tolist() for sample in batch.samples]

    assert advantages("key") == advantages(None)
    assert advantages(None)[-1][0] > 0.8


def test_turn_level_credit_reads_the_turns_of_an_agent_in_the_order_of_time() -> None:
    """The segments of an agent may overlap in time; the reward at the end is discounted over the turns before it."""
    turns = [conversation(name, [(name, None)], 1.0).segments[0] for name in "ab"]
    credit = CreditSettings(estimator="gigpo", options={"gamma": 0.5, "normalize": False})

    def advantages(order: tuple[int, int]) -> list[float]:
        agent = replace(conversation("agent", [], 1.0), segments=tuple(turns), info={TURN_ORDER: list(order)})
        other = conversation("other", [("a", None)], 0.0)
        group = Group(GroupSpec(Task("task"), fresh=2), (agent, other), ticket=0)
        batch = build([group], credit, LossSettings(), 64)
        return [float(sample.advantages[sample.mask][0]) for sample in batch.samples[:2]]

    # "a" is met by both, with the returns 0.5 and 0 as the first turn, and 1 and 0 as the second
    assert advantages((0, 1)) == [0.5 + 0.25, 0.5]
    assert advantages((1, 0)) == [0.5 + 0.5, 0.5]


def test_texts_of_different_roles_are_different_states() -> None:
    user = conversation("user", [("a", None)], 1.0)
    tool = [
        replace(turn, message={**turn.message, "role": "tool"}) if not turn.sampled else turn for turn in user.turns()
    ]
    assert turn_states(user) != turn_states(replace(user, segments=(tuple(tool),)))


def test_an_empty_text_is_a_state_like_any_other() -> None:
    [state] = turn_states(conversation("a", [("seen", "")], 1.0))
    assert state == ""


def test_a_turn_that_continues_an_answer_has_a_state_of_its_own() -> None:
    turns = conversation("cut", [("a", None), ("b", None)], 1.0).segments[0]
    cut = replace(conversation("cut", [], 1.0), segments=((*turns[:2], turns[3]),))
    first, second = turn_states(cut)
    assert first == turn_states(conversation("other", [("a", None)], 0.0))[0]
    assert second != turn_states(replace(cut, id="other"))[1]


def test_each_part_of_a_score_is_normalised_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    members = [Member(1.0), Member(1.0), Member(1.0), Member(None), Member(1.0, replayed=True)]
    parts = [{"right": 0.0, "form": 2.0}, {"right": 1.0, "form": 4.0}, {"form": 9.0, "rare": 1.0}, {}, {"right": 2.0}]
    alike = [{"right": 1.0, "form": 3.0}, {"right": 1.0, "form": 3.0}]
    groups = []
    for index, of_group in enumerate([parts, alike]):
        group = make_group(index, members[: len(of_group)], np.random.default_rng(index))
        trajectories = tuple(
            replace(t, score=replace(t.score, parts=own)) for t, own in zip(group.trajectories, of_group, strict=True)
        )
        groups.append(replace(group, trajectories=trajectories))

    def advantages(zero_variance: str = "keep", **per_part: float) -> tuple[Batch, list[float]]:
        credit = CreditSettings.model_validate({"per_part": per_part, "zero_variance": zero_variance})
        batch = build(groups, credit, LossSettings(), 256)
        return batch, [float(sample.advantages[sample.mask][0]) for sample in batch.samples]

    # "right" has the values 0 and 1 (mean 1/2, variance 1/2), "form" 2, 4 and 9 (mean 5, variance 26/2). The third
    # member has no "right", only one has "rare", and the stored one with "right" = 2 has no "form".
    right, form = 0.5**0.5 + 1e-6, 13**0.5 + 1e-6
    expected = [-0.5 / right - 0.25 * 3 / form, 0.5 / right - 0.25 * 1 / form, 0.25 * 4 / form, 2**0.5]
    batch, found = advantages(right=1.0, form=0.25, rare=3.0)
    assert found == pytest.approx([*expected, 0.0, 0.0], abs=1e-6)
    assert [part.zero_variance for part in batch.parts] == [False, True]
    # All scores are equal, so that the score alone teaches nothing.
    assert advantages()[1] == [0.0] * 6
    assert advantages("drop", right=1.0)[1] == pytest.approx([-0.5 / right, 0.5 / right, 2**0.5], abs=1e-6)
    assert not caplog.messages
    for _ in range(2):
        assert advantages(unknown=1.0)[1] == [0.0] * 6
    assert len(caplog.messages) == 1
    assert "'unknown'" in caplog.messages[0]


def test_dropping_groups_without_variance_removes_them_from_the_denominator() -> None:
    random = np.random.default_rng(0)
    flat = make_group(0, [Member(1.0), Member(1.0), Member(None)], random)
    mixed = make_group(1, [Member(1.0), Member(0.0)], random)
    kept = build_default([flat, mixed])
    dropped = build([flat, mixed], CreditSettings(zero_variance="drop"), LossSettings(), 256)
    assert [part.zero_variance for part in kept.parts] == [True, False]
    assert [part.zero_variance for part in dropped.parts] == [True, False]
    assert [part.tokens for part in kept.parts] == [10, 10]
    assert [part.tokens for part in dropped.parts] == [0, 10]
    assert [part.sequences for part in dropped.parts] == [0, 2]
    assert all(sample.zero_advantage for sample in kept.parts[0].samples)
    assert not dropped.parts[0].samples
    assert [part.invalid for part in dropped.parts] == [1, 0]


@pytest.mark.parametrize("score", [0.1, 0.7, 12.3, 1000.1])
def test_the_score_of_the_greedy_rollout_has_no_advantage_with_remax(score: float) -> None:
    group = make_group(0, [Member(score), Member(score)], np.random.default_rng(0))
    group = replace(group, spec=replace(group.spec, greedy=True), greedy=group.trajectories[0])
    batch = build([group], CreditSettings(estimator="remax"), LossSettings(), 256)
    assert all(sample.zero_advantage for sample in batch.samples)


def test_scores_that_differ_only_in_float64_are_not_dropped() -> None:
    group = make_group(0, [Member(16777216.0), Member(16777217.0)], np.random.default_rng(0))
    batch = build([group], CreditSettings(zero_variance="drop"), LossSettings(), 256)
    assert not batch.parts[0].zero_variance
    assert len(batch.samples) == 2


@pytest.mark.parametrize("needed", ["turns", "states"])
def test_an_estimator_gets_the_one_of_turns_and_states_that_it_needs(needed: str) -> None:
    @estimator(f"counts {needed}, of a test", group_local=True, needs=[needed], turn_rewards=True)
    def counted(rewards: Rewards, *, turns: Any = None, states: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        [given] = (values for values in (turns, states) if values is not None)
        return given.double(), given.double()

    group = Group(GroupSpec(Task("task"), 1), (conversation("a", [("x", None), ("y", None), ("x", None)], 1.0),), 0)
    batch = build([group], CreditSettings(estimator=f"counts {needed}, of a test"), LossSettings(), 64)
    sample = batch.samples[0]
    assert sample.advantages[sample.mask][::2].tolist() == ([1, 2, 3] if needed == "turns" else [0, 1, 0])


def test_zero_variance_drop_follows_the_grouping_of_replayed_members() -> None:
    """With grouping "own", a replayed member has an advantage whatever rewards the fresh members have."""
    group = make_group(0, [Member(1.0), Member(1.0), Member(1.0, replayed=True)], np.random.default_rng(0))
    credit = CreditSettings(estimator="dr_grpo", zero_variance="drop")
    for grouping, kept in (("shared", []), ("own", [True])):
        replay = ReplaySettings.model_validate({"grouping": grouping})
        batch = assign_advantages(build_samples([group], 256), credit, LossSettings(), 256, replay=replay)
        assert [sample.off_policy for sample in batch.samples] == kept
        assert not any(sample.zero_advantage for sample in batch.samples)
        assert batch.parts[0].zero_variance


def test_replayed_members_are_compared_with_the_baseline_of_fresh_ones() -> None:
    group = make_group(0, [Member(0.0), Member(0.0), Member(1.0, replayed=True)], np.random.default_rng(0))
    samples = build_default([group]).samples
    assert [sample.off_policy for sample in samples] == [False, False, True]
    assert [sample.zero_advantage for sample in samples] == [True, True, False]
    assert samples[2].advantages[samples[2].mask] == pytest.approx(1.0, abs=2e-6)


def test_groups_without_valid_members_give_an_empty_batch() -> None:
    group = make_group(0, [Member(None), Member(None)], np.random.default_rng(0))
    batch = build_default([group])
    assert (batch.groups, batch.samples, batch.parts[0].tokens, batch.parts[0].invalid) == (1, (), 0, 2)
    assert build_default([]).groups == 0
    assert micro_batches([], 100) == []


def test_a_too_long_sample_raises_a_user_error_and_one_without_prompt_a_value_error() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"task-0/0.* has 15 tokens, but model.max_context is 14"):
        build([make_group(0, [Member(turns=(6, 1))], random)], CreditSettings(), LossSettings(), 14)
    with pytest.raises(ValueError, match="first token"):
        build_default([make_group(0, [Member(context=0)], random)])


@settings(max_examples=examples(150))
@given(
    lengths=st.lists(st.integers(1, 500), max_size=80),
    budget=st.integers(1, 4000),
    padding=st.sampled_from([0.0, MAX_PADDING, 0.5]),
)
def test_a_plan_takes_every_row_once_within_the_budget_and_padding_limit(
    lengths: list[int], budget: int, padding: float
) -> None:
    plans = plan(lengths, budget, padding)
    assert sorted(row for rows in plans for row in rows) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in rows) for rows in plans]
    assert longest == sorted(longest, reverse=True)
    for rows in plans:
        padded, real = len(rows) * max(lengths[row] for row in rows), sum(lengths[row] for row in rows)
        assert len(rows) == 1 or padded <= budget
        assert padded - real <= padding * padded + 1e-9


@settings(max_examples=examples(40))
@given(seed=SEEDS, budget=st.integers(1, 300))
def test_micro_batches_hold_every_trained_token_at_the_position_that_predicts_it(seed: int, budget: int) -> None:
    samples = build_default(random_groups(np.random.default_rng(seed))).samples
    seen: list[int] = []
    for micro in micro_batches(samples, budget, pad_token=0):
        start = 0
        flat = micro.tokens.flatten()
        assert micro.real <= micro.tokens.numel()
        for line, row in enumerate(micro.samples):
            sample = samples[row]
            seen.append(row)
            positions = sample.mask.nonzero()[0]
            stop = start + positions.size
            assert micro.tokens[line, : sample.tokens.size - 1].tolist() == sample.tokens[:-1].tolist()
            assert not micro.tokens[line, sample.tokens.size - 1 :].any()
            assert flat[micro.index[start:stop]].tolist() == sample.tokens[positions - 1].tolist()
            for tensor, array in (
                (micro.targets, sample.tokens),
                (micro.old, sample.old),
                (micro.behaviour, sample.behaviour),
                (micro.advantages, sample.advantages),
                (micro.weights, sample.weights),
            ):
                assert tensor[start:stop].tolist() == array[positions].tolist()
            assert (micro.off_policy[start:stop] == sample.off_policy).all()
            assert (micro.sequence[start:stop] == sample.trajectory).all()
            start = stop
        assert start == micro.targets.numel()
    assert sorted(seen) == list(range(len(samples)))
