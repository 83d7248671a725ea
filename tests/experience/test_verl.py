"""Tests of `gleanrl.experience.interop.verl`: groups become the tensor dictionary of verl and AgentEvolver and are read
back from it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.experience.interop.verl import from_verl, to_verl
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.builders import Member, make_group, random_groups
from tests.strategies import examples

PAD = 5  # also a token of the texts, so that only the masks can tell what is padding
TASK = Task("t", payload={"n": 1})
NAMED = {
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask", "response_mask"),
    *("group_ids", "recorded_old_log_probs", "old_log_probs", "advantages", "returns", "token_level_rewards"),
}
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "verl.md").read_text()

Batch = dict[str, Any]


# --- by hand ------------------------------------------------------------------------------------
def small() -> list[Group]:
    """Return a group of a fresh member with two sampled turns and a replayed member with one."""
    fresh = Trajectory(
        "f",
        "t",
        ((context(1, 2), sampled([3, 4], [-1.0, -2.0], 7), context(5), sampled([6], [-3.0], 8), context(9)),),
        Score(0.75),
        StopReason.DONE,
    )
    stored = Trajectory("r", "t", ((context(1), sampled([7, 8], [-0.5, -0.25], 2)),), Score(1.0), StopReason.DONE)
    return [Group(GroupSpec(TASK, 1, (stored,)), (fresh, stored), 0)]


def context(*tokens: int) -> Turn:
    return Turn({"role": "user", "content": ""}, np.array(tokens))


def sampled(tokens: Sequence[int], logprobs: Sequence[float], version: int) -> Turn:
    return Turn({"role": "assistant", "content": ""}, np.array(tokens), np.array(logprobs), version)


def test_every_array_of_a_small_batch_has_the_expected_values() -> None:
    batch = to_verl(
        small(),
        pad_token=0,
        max_prompt=3,
        old_logprobs=[np.array([9, 9, -1.5, -2.5, 9, -3.5, 9]), -9.0],
        advantages=[-0.5, np.array([9, 0.25, 0.5])],
        returns=[0.0, 2.0],
    )
    expected: Batch = {
        "prompts": [[0, 1, 2], [0, 0, 1]],
        "responses": [[3, 4, 5, 6, 9], [7, 8, 0, 0, 0]],
        "input_ids": [[0, 1, 2, 3, 4, 5, 6, 9], [0, 0, 1, 7, 8, 0, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 2, 2, 2]],
        "loss_mask": [[0, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0]],
        "response_mask": [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]],
        "exp_mask": [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0]],
        "step_ids": [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]],
        "turn_ids": [[-1, 0, 0, 1, 1, 2, 3, 4], [-1, -1, 0, 1, 1, -1, -1, -1]],
        "recorded_old_log_probs": [[-1.0, -2.0, 0, -3.0, 0], [-0.5, -0.25, 0, 0, 0]],
        "rollout_log_probs": [[-1.0, -2.0, 0, -3.0, 0], [-0.5, -0.25, 0, 0, 0]],
        "old_log_probs": [[-1.5, -2.5, 0, -3.5, 0], [-0.5, -0.25, 0, 0, 0]],  # replayed: always as recorded
        "advantages": [[-0.5, -0.5, 0, -0.5, 0], [0.25, 0.5, 0, 0, 0]],
        "returns": [[0, 0, 0, 0, 0], [2.0, 2.0, 0, 0, 0]],
        "token_level_rewards": [[0, 0, 0, 0.75, 0], [0, 1.0, 0, 0, 0]],
        "group_ids": [0, 0],
        "trajectory_ids": [0, 1],
        "segment_ids": [0, 0],
        "versions": [[-1, -1, -1, 7, 7, -1, 8, -1], [-1, -1, -1, 2, 2, -1, -1, -1]],
        "scores": [0.75, 1.0],
        "valid": [1, 1],
        "uid": ["0", "0"],
        "task_ids": ["t", "t"],
        "rollout_ids": [trajectory.id for trajectory in small()[0].trajectories],
    }
    assert batch.keys() == expected.keys()
    assert batch.keys() >= NAMED
    for key, values in expected.items():
        dtypes = {"scores": np.float64, "uid": object, "task_ids": object, "rollout_ids": object}
        real = key.endswith(("probs", "rewards", "advantages", "returns"))
        assert batch[key].dtype == dtypes.get(key, np.float32 if real else np.int64), key
        assert batch[key].tolist() == values, key


def test_a_guided_trajectory_is_off_policy_including_its_prompt_and_stays_fresh() -> None:
    [group] = small()
    guided = replace(group.trajectories[0], info={"guided": "discard"})
    group = replace(group, trajectories=(guided, *group.trajectories[1:]))
    batch = to_verl([group], pad_token=0, old_logprobs=[-9.0, -9.0])
    assert batch["exp_mask"].tolist() == [[1, 1, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch["old_log_probs"][0].tolist() == [-1.0, -2.0, 0, -3.0, 0]
    [back] = from_verl(batch, [TASK])
    assert len(back.fresh) == 1
    assert back.fresh[0].info == {"guided": "discard"}


# --- any groups ---------------------------------------------------------------------------------
def groups_of(seed: int) -> list[Group]:
    random = np.random.default_rng(seed)
    return random_groups(random, count=int(random.integers(1, 5)))


def identical(a: Trajectory, b: Trajectory) -> bool:
    """Whether two trajectories are equal, bit for bit, in everything that the dictionary holds."""

    def content(trajectory: Trajectory) -> Any:
        score = (trajectory.score.valid, trajectory.score.value if trajectory.score.valid else None)
        turns = [
            [(t.tokens.tobytes(), None if t.logprobs is None else t.logprobs.tobytes(), t.version) for t in segment]
            for segment in trajectory.segments
        ]
        return trajectory.id, trajectory.task_id, score, turns

    return content(a) == content(b)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_round_trip_gives_back_every_group_in_any_order_of_rows(seed: int, tensors: bool) -> None:
    groups = groups_of(seed)
    batch = to_verl(groups, pad_token=PAD, keep_all=True)
    names = [t.id for group in groups for t in group.trajectories]
    order = np.random.default_rng(seed).permutation(len(batch["group_ids"]))  # verl balances rows over its workers
    shuffled: Batch = {key: value[order] for key, value in batch.items()}
    ids = [names[number] for number in shuffled["trajectory_ids"]]
    if tensors:
        shuffled = {key: torch.from_numpy(value) for key, value in shuffled.items() if value.dtype != object}
    back = from_verl(shuffled, [group.spec.task for group in groups], ids=ids)
    assert len(back) == len(groups)
    for ours, theirs in zip(groups, back, strict=True):
        assert theirs.spec.task is ours.spec.task
        assert theirs.spec.fresh == ours.spec.fresh
        assert theirs.ticket == ours.ticket
        assert len(theirs.trajectories) == len(ours.trajectories)
        assert all(map(identical, ours.trajectories, theirs.trajectories))
    again = to_verl(back, pad_token=PAD, keep_all=True)
    assert all(np.array_equal(again[key], value) and again[key].dtype == value.dtype for key, value in batch.items())


def test_a_replayed_trajectory_with_a_segment_without_sampled_tokens_survives_a_round_trip() -> None:
    """No token of such a segment could say that it is replayed."""
    sampled = Turn({}, np.array([3, 4], np.int32), np.array([-1, -2], np.float32), 1)
    context = Turn({}, np.array([1, 2], np.int32))
    segments = ((context,), (context, sampled), (context,))
    old = Trajectory("old", TASK.id, segments, Score(1.0), StopReason.DONE)
    batch = to_verl([Group(GroupSpec(TASK, 0, (old,)), (old,), 0)], pad_token=PAD, keep_all=True)
    [back] = from_verl(batch, [TASK], ids=["old"] * 3)
    assert back.fresh == ()
    assert identical(back.trajectories[0], old)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32 - 1))
def test_prompts_are_padded_left_and_responses_right_without_nan(seed: int) -> None:
    groups = groups_of(seed)
    batch = to_verl(groups, pad_token=PAD, max_prompt=40, max_response=60)
    kept = [t for group in groups for t in group.trajectories if t.score.valid]
    segments = [(t, segment) for t in kept for segment in t.segments]
    replayed = {id(t) for group in groups for t in group.spec.replayed}
    assert len(batch["input_ids"]) == len(segments)
    for row, (trajectory, segment) in enumerate(segments):
        tokens = [token for turn in segment for token in turn.tokens.tolist()]
        trained = [turn.sampled for turn in segment for _ in turn.tokens]
        first = trained.index(True)
        left = 40 - first
        line = batch["input_ids"][row].tolist()
        assert line[left : left + len(tokens)] == tokens
        assert set(line[:left] + line[left + len(tokens) :]) <= {PAD}
        assert batch["attention_mask"][row].nonzero()[0].tolist() == list(range(left, left + len(tokens)))
        assert batch["position_ids"][row][left : left + len(tokens)].tolist() == list(range(len(tokens)))
        assert batch["loss_mask"][row].nonzero()[0].tolist() == [left + i for i, flag in enumerate(trained) if flag]
        off = batch["loss_mask"][row] if id(trajectory) in replayed else np.zeros_like(batch["loss_mask"][row])
        assert np.array_equal(batch["exp_mask"][row], off)
        expected: list[int] = []
        step = -1
        for turn in segment:
            step += turn.sampled and turn.tokens.size > 0
            expected += [step] * turn.tokens.size
        padding = [-1] * (60 - len(expected[first:]))
        assert batch["step_ids"][row].tolist() == [*expected[first:], *padding]
        last = left + max(i for i, flag in enumerate(trained) if flag) - 40
        rewards = batch["token_level_rewards"][row]
        assert rewards[last] == trajectory.score.value
        assert not np.delete(rewards, last).any()
    assert np.array_equal(batch["input_ids"], np.concatenate([batch["prompts"], batch["responses"]], 1))
    assert np.array_equal(batch["loss_mask"][:, 40:], batch["response_mask"])
    assert all(np.isfinite(value).all() for value in batch.values() if value.dtype != object)


def test_invalid_members_are_left_out_without_keep_all() -> None:
    group = make_group(0, [Member(1.0), Member(None), Member(0.0)], np.random.default_rng(0))
    assert to_verl([group], pad_token=0)["trajectory_ids"].tolist() == [0, 2]
    batch = to_verl([group], pad_token=0, keep_all=True)
    assert batch["valid"].tolist() == [1, 0, 1]
    assert not batch["token_level_rewards"][1].any()
    assert batch["scores"][1] == 0
    assert [t.score.valid for t in from_verl(batch, [group.spec.task])[0].trajectories] == [True, False, True]


def test_a_score_that_float32_cannot_hold_is_restored_exactly() -> None:
    group = make_group(0, [Member(0.7)], np.random.default_rng(0))
    assert from_verl(to_verl([group], pad_token=0), [group.spec.task])[0].trajectories[0].score.value == 0.7


def test_turn_ids_keep_adjacent_context_turns_apart_and_text_is_decoded() -> None:
    segment = (context(1), context(2, 3), sampled([4], [-1.0], 0))
    group = Group(GroupSpec(TASK, 1), (Trajectory("x", "t", (segment,), Score(1.0), StopReason.DONE),), 0)
    batch = to_verl([group], pad_token=0)
    turns = from_verl(batch, [TASK], decode=lambda ids: "-".join(map(str, ids)))[0].trajectories[0].segments[0]
    assert [turn.message["content"] for turn in turns] == ["1", "2-3", "4"]
    assert [turn.message["role"] for turn in turns] == ["user", "user", "assistant"]
    del batch["turn_ids"]
    merged = from_verl(batch, {0: TASK})[0].trajectories[0].segments[0]
    assert [turn.tokens.tolist() for turn in merged] == [[1, 2, 3], [4]]


def test_arrays_per_token_are_divided_over_the_segments_of_a_trajectory() -> None:
    group = make_group(0, [Member(1.0, turns=(2, 3, 1), segments=2, trailing=2)], np.random.default_rng(0))
    [trajectory] = group.trajectories
    values = np.arange(trajectory.total_tokens, dtype=np.float32)
    batch = to_verl([group], pad_token=0, advantages=[values])
    flags = [turn.sampled for turn in trajectory.turns() for _ in turn.tokens]
    assert batch["segment_ids"].tolist() == [0, 1]
    assert batch["advantages"][batch["response_mask"] == 1].tolist() == [v for v, flag in enumerate(flags) if flag]
    assert batch["token_level_rewards"].sum(-1).tolist() == [1.0, 1.0]  # the whole score in every row


def test_no_groups_give_an_empty_batch() -> None:
    batch = to_verl([], pad_token=0)
    assert all(len(value) == 0 for value in batch.values())
    assert from_verl(batch, []) == []


# --- batches of AgentEvolver --------------------------------------------------------------------
def foreign() -> Batch:
    """Return a batch as in AgentEvolver: other keys, int32, and a response mask that covers environment text."""
    batch = to_verl(small(), pad_token=0)
    theirs = {key: batch[key].astype(np.int32) for key in ("responses", "input_ids", "attention_mask", "loss_mask")}
    width = batch["prompts"].shape[1]
    return {
        **theirs,
        "exp_mask": batch["exp_mask"] * batch["loss_mask"],
        "response_mask": batch["attention_mask"][:, width:],
        "group_ids": np.array([0, 0]),
        "recorded_old_log_probs": np.where(batch["exp_mask"][:, width:] == 1, batch["recorded_old_log_probs"], 0),
        "old_log_probs": batch["old_log_probs"],
        "token_level_scores": batch["token_level_rewards"],
        "token_level_rewards": batch["token_level_rewards"] - 0.125,  # includes a penalty
        "step_ids": np.zeros((2, 99)),  # is ignored
    }


def test_rows_of_agentevolver_become_trajectories() -> None:
    [group] = from_verl(foreign(), [TASK], ids=["a", "b"], version=4)
    for ours, theirs, version in zip(small()[0].trajectories, group.trajectories, (4, 4), strict=True):
        assert theirs.score.value == ours.score.value
        for one, other in zip(ours.turns(), theirs.turns(), strict=True):
            assert one.tokens.tobytes() == other.tokens.tobytes()
            assert one.sampled == other.sampled
            assert not one.sampled or one.logprobs.tobytes() == other.logprobs.tobytes()  # type: ignore[union-attr]
            assert other.version == (version if one.sampled else -1)
    assert [t.id for t in group.fresh] == ["a"]
    assert [t.id for t in group.spec.replayed] == ["b"]


def put(key: str, where: Any, value: Any) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        batch[key][where] = value

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda b: b.pop("group_ids"), "no group_ids"),
        (lambda b: b.pop("recorded_old_log_probs"), "no recorded_old_log_probs"),
        (lambda b: b.pop("token_level_scores") is b.pop("token_level_rewards"), "no scores or"),
        (lambda b: b.update(old_log_probs=b["old_log_probs"][:, :-1]), r"old_log_probs has shape \(2, 4\)"),
        (lambda b: b.update(responses=b["responses"] + 1), "do not end with the responses"),
        (put("recorded_old_log_probs", 1, 0), "row 1 .* are zeros"),
        (put("old_log_probs", (0, 0), np.nan), "row 0 .* no log-prob"),
        (put("old_log_probs", (0, 0), 0.5), "row 0 .* no log-prob"),
        (put("token_level_scores", (1, 0), np.inf), "row 1 .* score of inf"),
        (put("attention_mask", (0, 4), 0), "row 0 .* trained on padding|row 0 .* right"),
        (put("attention_mask", (1, 1), 0), "row 1 .* before its first trained"),
        (put("loss_mask", (0, 0), 1), "row 0 .* outside its response"),
        (put("attention_mask", (0, 1), 0), "row 0 .* left of its prompt"),
        (put("attention_mask", (1, 6), 1), "row 1 .* right of its response"),
        (put("attention_mask", 1, 0), "row 1 .* no tokens"),
        (put("input_ids", (0, 0), -1), "row 0 .* token id"),
        (put("group_ids", 1, 3), "group_ids holds 3"),
        (lambda b: b.update(trajectory_ids=np.zeros(2, int), segment_ids=np.arange(2)), "not their group_ids, exp_"),
        (lambda b: b.update(trajectory_ids=np.zeros(2, int), segment_ids=np.zeros(2, int)), "there twice"),
    ],
)
def test_inconsistent_batches_raise_a_one_line_user_error(change: Callable[[Batch], Any], line: str) -> None:
    batch = foreign()
    change(batch)
    with pytest.raises(UserError, match=line) as caught:
        from_verl(batch, [TASK])
    assert "\n" not in str(caught.value)


# --- sizes that do not fit ----------------------------------------------------------------------
def test_a_too_long_row_is_refused_and_not_truncated() -> None:
    with pytest.raises(UserError, match=r"'f' has a prompt of 2 tokens, but max_prompt is 1"):
        to_verl(small(), pad_token=0, max_prompt=1)
    with pytest.raises(UserError, match=r"'f' has a response of 5 tokens, but max_response is 4"):
        to_verl(small(), pad_token=0, max_response=4)


def test_arrays_of_wrong_sizes_and_trajectories_without_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="1 items for 2"):
        to_verl(small(), pad_token=0, advantages=[1.0])
    with pytest.raises(ValueError, match=r"shape \(6,\), but the trajectory has 7 tokens"):
        to_verl(small(), pad_token=0, returns=[np.zeros(6), 0.0])
    lone = Trajectory("x", "t", ((sampled([1], [-1.0], 0),),), Score(1.0), StopReason.DONE)
    with pytest.raises(ValueError, match="cannot be sampled"):
        to_verl([Group(GroupSpec(TASK, 1), (lone,), 0)], pad_token=0)


# --- other containers ---------------------------------------------------------------------------
class LikeTensorDict(dict[str, Any]):
    """A dictionary that refuses `in`, as a TensorDict does."""

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError


def test_a_batch_may_be_a_mapping_that_refuses_in() -> None:
    [group] = from_verl(LikeTensorDict(to_verl(small(), pad_token=0)), [TASK], ids=["f", "r"])
    assert all(map(identical, small()[0].trajectories, group.trajectories))


def test_a_batch_survives_a_round_trip_through_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = to_verl(small(), pad_token=0)
    columns = {
        key: tensordict.NonTensorStack(*value) if value.dtype == object else torch.from_numpy(value)
        for key, value in batch.items()
    }
    tensors = tensordict.TensorDict(columns, batch_size=2)
    [group] = from_verl(tensors, [TASK], ids=["f", "r"])
    assert all(map(identical, small()[0].trajectories, group.trajectories))


def test_the_code_of_the_docs_page_prints_the_shown_output(tmp_path: Path) -> None:
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    answer = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert answer.stdout == "".join(shown)
