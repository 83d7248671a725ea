"""Groups whose episodes begin with the first turns of a stored success: playing, training, planning and resuming."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.algorithms.batch import build, build_samples
from gleanrl.config.settings import ContextSettings, CreditSettings, LossSettings, ReplaySettings, ScheduleSettings
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.restarts import Restarts, beginning
from gleanrl.protocols import Environment, Observation
from gleanrl.rewards import RewardAgent
from gleanrl.rewards.http import HttpReward
from gleanrl.rollout.player import Player
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.simulate import virtual_time
from gleanrl.train import score_trajectory, train
from gleanrl.types import START_TURNS, Group, GroupSpec, Message, Score, StopReason, Task, Trajectory, Turn
from tests.experience.replay_world import Stream, group, make_replay_run
from tests.experience.test_curriculum import propose, wrap
from tests.loop_world import GuessEnvironment, renderer, tasks
from tests.rewards.service import Plan, Service
from tests.strategies import examples

PRESETS = ["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"]
TASK = Task("count", payload={"word": "left"})


class Counting(Environment):
    """An episode of four turns. Each observation names the actions so far, and ``noise`` is added to it."""

    def __init__(self, task: Task, noise: str = "") -> None:
        self.actions: list[str] = []
        self._noise = noise

    async def reset(self) -> Observation:
        return self._observe(None)

    async def step(self, message: Message) -> Observation:
        self.actions.append(message["content"])
        return self._observe(float(message["content"] == "left"))

    def _observe(self, reward: float | None) -> Observation:
        messages = (Message(role="user", content=" ".join(["say left or right", *self.actions]) + self._noise),)
        return Observation(messages, done=len(self.actions) == 4, reward=reward)


def answers(*words: str) -> ScriptedSampler:
    """Return a sampler that says these words in turn."""
    r, said = renderer(), iter(words)
    return ScriptedSampler(
        lambda *_: [*r.tokenizer(next(said), add_special_tokens=False)["input_ids"], r.end_of_turn], version=5
    )


def play(sampler: ScriptedSampler, environment: Environment, start: Sequence[Turn] = ()) -> Trajectory:
    context = ContextSettings(max_turns=4, max_tokens_per_turn=4)
    player = Player(lambda _: environment, sampler, renderer(), context, 1.0, max_context=512)
    return asyncio.run(player.play(TASK, trajectory_id="t", seed=1, start=tuple(start)))


def all_tokens(trajectory: Trajectory) -> list[int]:
    return [token for turn in trajectory.turns() for token in turn.tokens.tolist()]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_episode_goes_on_after_its_start(turns: int) -> None:
    words = ["left", "right", "left", "left"]
    whole = play(answers(*words), Counting(TASK))
    start = beginning(whole.segments[0], turns)
    environment = Counting(TASK)
    again = play(answers(*words[turns:]), environment, start)
    assert environment.actions == words
    assert all_tokens(again) == all_tokens(whole)
    assert [turn.message["content"] for turn in again.sampled_turns()] == words[turns:]
    assert again.info[START_TURNS] == turns
    assert again.info["turns"] == 4
    # What the start has earned belongs to the score, but to no turn.
    assert again.score.value == whole.score.value == 3.0
    assert [turn.reward for turn in again.sampled_turns()] == [float(word == "left") for word in words[turns:]]


def test_an_environment_with_other_observations_is_played_from_the_beginning() -> None:
    whole = play(answers(*["left"] * 4), Counting(TASK))
    for turns in (1, 3):
        other = play(answers(*["right"] * 4), Counting(TASK, noise=" left"), beginning(whole.segments[0], turns))
        assert other.info[START_TURNS] == 0
        assert [turn.message["content"] for turn in other.sampled_turns()] == ["right"] * 4


def test_an_environment_that_ends_within_the_start_is_played_from_the_beginning() -> None:
    class Short(Counting):
        def _observe(self, reward: float | None) -> Observation:
            return Observation((Message(role="user", content="say left or right"),), done=len(self.actions) == 1)

    whole = play(answers(*["left"] * 4), Counting(TASK))
    start = (*whole.segments[0][:2], *whole.segments[0][2:4])
    assert play(answers("right", "right"), Short(TASK), start).info[START_TURNS] == 0


def test_a_start_that_leaves_no_turn_is_not_repeated() -> None:
    class Long(Counting):
        def _observe(self, reward: float | None) -> Observation:
            return replace(super()._observe(reward), done=False)

    whole = play(answers(*["left"] * 4), Long(TASK))
    assert whole.stop is StopReason.MAX_TURNS
    again = play(answers(*["right"] * 4), Long(TASK), beginning(whole.segments[0], 4))
    assert again.info[START_TURNS] == 0
    assert [turn.message["content"] for turn in again.sampled_turns()] == ["right"] * 4


def test_turn_rewards_that_come_with_the_score_are_those_of_the_sampled_turns() -> None:
    class AtTheEnd(Counting):
        def _observe(self, reward: float | None) -> Observation:
            seen = replace(super()._observe(None), reward=None)
            return replace(seen, score=Score(1.0, turns=(0.1, 0.2, 0.3, 0.4))) if seen.done else seen

    words = ["left", "right", "left", "left"]
    whole = play(answers(*words), AtTheEnd(TASK))
    again = play(answers(*words[1:]), AtTheEnd(TASK), beginning(whole.segments[0], 1))
    assert again.score.valid
    assert [turn.reward for turn in again.sampled_turns()] == [0.2, 0.3, 0.4]


def test_a_service_may_give_a_turn_reward_to_each_answer_that_it_sees() -> None:
    """It sees those of the start too, and not that the model did not sample them."""

    def answer(path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        said = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        return 200, {"score": 1.0, "turns": [float(word == "left") for word in said]}

    words = ["left", "right", "right", "left"]
    whole = play(answers(*words), Counting(TASK))

    async def score(trajectory: Trajectory) -> Trajectory:
        async with Service(Plan(answer=answer)) as service, RewardAgent(HttpReward(service.url)) as agent:
            return await score_trajectory(agent, TASK, trajectory)

    for turns in (0, 1, 3):
        played = play(answers(*words[turns:]), Counting(TASK), beginning(whole.segments[0], turns) if turns else ())
        scored = asyncio.run(score(played))
        assert scored.score.value == 1.0
        assert [turn.reward for turn in scored.sampled_turns()] == [float(word == "left") for word in words[turns:]]
    failed = played.scored(Score(1.0, turns=(0.0, 1.0, 0.0)))  # neither the sampled turn nor all four
    assert not failed.score.valid


def test_only_what_follows_the_start_is_trained() -> None:
    whole = play(answers("left", "right", "left", "left"), Counting(TASK))
    start = beginning(whole.segments[0], 2)
    members = [play(answers(*words), Counting(TASK), start) for words in (("left", "left"), ("left", "right"))]
    plan = GroupSpec(TASK, 2, start=start)
    batch = build([Group(plan, tuple(members), 0)], CreditSettings(), LossSettings(), 512)
    before = sum(turn.tokens.size for turn in start)
    for sample, sign in zip(batch.samples, (1, -1), strict=True):
        assert not sample.mask[:before].any()
        assert not sample.advantages[:before].any()
        assert sample.mask.sum() == 2 * 2  # a word and the end of the turn, twice
        assert (np.sign(sample.advantages[sample.mask]) == sign).all()
        assert sample.version == 5
    for sample in build_samples([Group(plan, tuple(members), 0)], 512, observations=True).samples:
        assert sample.observed is not None
        assert sample.observed.nonzero()[0].min() > sample.mask.argmax()  # the start's observations are not among them


def stored(pool: ExperiencePool, name: str, turns: int, *, solved: int, attempts: int) -> None:
    """Store a success of a task with this many turns, and then the results of a group of the task."""
    context = Turn({"role": "user", "content": "?"}, np.array([1, 2], np.int32))
    said = Turn({"role": "assistant", "content": "!"}, np.array([3], np.int32), np.full(1, -0.5, np.float32), 0)
    task = Task(name, payload={"word": "left"})
    success = Trajectory(f"{name}.0", name, ((context, said) * turns,), Score(1.0), StopReason.DONE)
    failure = Trajectory(f"{name}.1", name, ((context, said, said),), Score(0.0), StopReason.DONE)
    pool.observe([Group(GroupSpec(task, 2), (success, failure), 0)], 0)
    pool.observe([group(name, solved, attempts, first=7)], 1)


def restarted(restarts: Restarts, spec: GroupSpec, rate: float, *, same: bool = True) -> Group:
    """Return the group of ``spec``, of which this share succeeded."""
    solved = round(rate * spec.fresh)
    members = tuple(
        Trajectory(str(i), spec.task.id, (), Score(float(i < solved)), StopReason.DONE, {START_TURNS: int(same)})
        for i in range(spec.fresh)
    )
    return Group(spec, members, 0)


def test_the_start_moves_with_the_success_of_the_group(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        stored(pool, "hard", 5, solved=0, attempts=4)
        stored(pool, "solved", 5, solved=2, attempts=4)
        restarts = Restarts(pool, ReplaySettings(), 4)
        turns = []
        for rate in (0.5, 0.25, 0.0, 1.0, 0.75, 1.0, 1.0):
            drawn = restarts.draw(3, np.random.default_rng(0), set())
            restarts.commit(drawn)
            [(spec, _)] = drawn  # the other task is solved too often
            turns.append(sum(turn.sampled for turn in spec.start))
            assert spec.task.id == "hard"
            assert spec.fresh == 4
            restarts.observe([restarted(restarts, spec, rate)])
        assert turns == [3, 3, 4, 4, 3, 2, 1]
        assert restarts.draw(3, np.random.default_rng(0), set()) == []  # it is solved from its beginning now


def test_of_groups_planned_with_the_same_start_one_moves_it(tmp_path: Path) -> None:
    """With staleness, several are planned before the first is learned from. Earlier starts were not tried yet."""
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        stored(pool, "hard", 5, solved=0, attempts=4)
        restarts, planned = Restarts(pool, ReplaySettings(), 4), []
        for _ in range(3):
            drawn = restarts.draw(1, np.random.default_rng(0), set())
            restarts.commit(drawn)
            planned.append(drawn[0][0])
        for spec in planned:
            restarts.observe([restarted(restarts, spec, 1.0)])
        [(spec, _)] = restarts.draw(1, np.random.default_rng(0), set())
        assert [sum(turn.sampled for turn in each.start) for each in (*planned, spec)] == [3, 3, 3, 2]


def test_a_group_with_fewer_members_is_hard_by_its_rate(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        for name, solved, attempts in (("a", 1, 4), ("b", 1, 3), ("c", 1, 2), ("d", 2, 4), ("e", 0, 1)):
            stored(pool, name, 5, solved=solved, attempts=attempts)
        drawn = Restarts(pool, ReplaySettings(), 4).draw(9, np.random.default_rng(0), set())
        assert sorted(spec.task.id for spec, _ in drawn) == ["a", "b", "e"]


def test_tasks_that_are_solved_from_their_beginning_leave_their_places_to_others(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        for index in range(20):
            stored(pool, f"done-{index}", 5, solved=0, attempts=4)
        for index in range(3):
            stored(pool, f"open-{index}", 5, solved=1, attempts=4)
        restarts = Restarts(pool, ReplaySettings(), 4)
        restarts.cuts.update({f"done-{index}": [1, 0, 5] for index in range(20)})
        for seed in range(10):
            drawn = restarts.draw(3, np.random.default_rng(seed), set())
            assert sorted(spec.task.id for spec, _ in drawn) == ["open-0", "open-1", "open-2"]


def test_restarts_do_not_accumulate_while_no_task_is_hard(tmp_path: Path) -> None:
    settings = ReplaySettings(restart_share=0.25, task_ratio=0.0)
    curriculum = wrap(tmp_path, settings, Stream([f"t{i}" for i in range(30)], 4), 4)
    with curriculum.pool as pool:
        for _ in range(8):
            propose(curriculum, 4)
        for i in range(5):
            stored(pool, f"hard {i}", 5, solved=0, attempts=4)
        assert [sum(bool(spec.start) for spec in propose(curriculum, 4)) for _ in range(3)] == [2, 1, 1]


def test_successes_of_limited_sources_are_not_restarted(tmp_path: Path) -> None:
    limited = ReplaySettings(source_limits={"own": 0.5})
    with ExperiencePool(tmp_path / "pool.sqlite", limited) as pool:
        stored(pool, "hard", 5, solved=0, attempts=4)
        assert Restarts(pool, limited, 4).draw(1, np.random.default_rng(0), set()) == []
        assert len(Restarts(pool, ReplaySettings(), 4).draw(1, np.random.default_rng(0), set())) == 1


def test_a_success_whose_observations_are_not_repeated_is_evicted(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        stored(pool, "hard", 5, solved=0, attempts=4)
        restarts = Restarts(pool, ReplaySettings(), 4)
        restarts.commit(restarts.draw(1, np.random.default_rng(0), {"another"}))
        [(spec, cut)] = restarts.draw(1, np.random.default_rng(0), set())
        metrics = restarts.observe([restarted(restarts, spec, 0.5, same=False)])
        assert metrics["restart/refused"] == 1
        assert cut[0] not in [each.key for each in pool.stored(["hard"])["hard"]]
        assert restarts.draw(1, np.random.default_rng(0), set()) == []


def test_a_late_refusal_does_not_evict_another_success(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings()) as pool:
        stored(pool, "hard", 5, solved=0, attempts=4)
        other = group("hard", 1, 4, first=20)  # a second success, with other tokens
        pool.observe([other, group("hard", 0, 4, first=30)], 2)
        restarts = Restarts(pool, ReplaySettings(), 4)
        planned = []
        for _ in range(2):
            drawn = restarts.draw(1, np.random.default_rng(0), set())
            restarts.commit(drawn)
            planned += drawn
        early, late = (restarted(restarts, spec, 0.5, same=False) for spec, _ in planned)
        restarts.observe([early])
        [(_, cut)] = drawn = restarts.draw(1, np.random.default_rng(0), set())
        restarts.commit(drawn)
        assert cut[0] != planned[0][1][0]
        assert restarts.observe([late])["restart/refused"] == 1
        assert [each.key for each in pool.stored(["hard"])["hard"]] == [cut[0]]


@settings(max_examples=examples(20))
@given(
    preset=st.sampled_from(PRESETS),
    share=st.sampled_from([0.25, 0.3, 0.5]),
    ratio=st.sampled_from([0.0, 0.5]),
    hard=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_each_batch_has_its_share_of_restarts_on_every_schedule(
    preset: Any, share: float, ratio: float, hard: int, seed: int
) -> None:
    schedule = ScheduleSettings(preset=preset, batch=8, group=4, chunks=2, staleness=2, min_valid=1)
    replay = ReplaySettings(
        enabled=True, task_ratio=ratio, restart_share=share, probe_fraction=0, retire_after=99, pool_updates=0
    )
    delays = np.random.default_rng(seed).exponential(0.01, 97)
    with TemporaryDirectory() as folder:
        run, curriculum = make_replay_run(
            *(Path(folder), schedule, replay),
            steps=4,
            problems=tasks(40),
            learner_delay=0.01,
            sample_delay=lambda seed, turn: delays[(seed + turn) % 97],
        )
        for name in range(hard):
            stored_run(curriculum.pool, f"hard-{name}")
        before = curriculum.pool.stats()["trajectories"]
        virtual_time.run(train(run))  # tasks of which one attempt in four succeeds in the run are restarted too
        steps = [groups for _, groups, _ in run.observer.steps]
        counted = sum(metrics["restart/groups"] for _, _, metrics in run.observer.steps)
        kept = curriculum.pool.stored([f"hard-{name}" for name in range(hard)])
        curriculum.pool.close()
    groups = [g for step in steps for g in step if g.spec.start]
    assert counted == len(groups)
    assert sorted(g.ticket for step in steps for g in step) == list(range(32))  # each ticket once
    if hard >= 8 and not ratio:
        assert len(groups) == int(4 * 8 * share + 1e-9)
    for found in groups:
        for member in found.fresh:
            assert member.info[START_TURNS] == 1
            assert sum(1 for _ in member.sampled_turns()) == 1
            start = np.concatenate([turn.tokens for turn in found.spec.start])
            assert np.array_equal(all_tokens(member)[: start.size], start)
    # Successes of restarted groups are not stored: a task keeps the two that it had, unless it was also played whole.
    whole = {g.spec.task.id for step in steps for g in step if not g.spec.start}
    assert all(len(own) == 1 for name, own in kept.items() if name not in whole)
    assert before == hard


def stored_run(pool: ExperiencePool, name: str) -> None:
    """Play a task of the scripted world once with success, store it, and let a group of the task fail."""
    task = Task(name, payload={"word": "left"})
    context = ContextSettings(max_turns=4, max_tokens_per_turn=4)
    player = Player(GuessEnvironment, answers("right", "left"), renderer(), context, 1.0, max_context=128)
    success = asyncio.run(player.play(task, trajectory_id=f"{name}.0", seed=1))
    assert success.score.value == 1.0
    pool.add(task, success)
    pool.observe([group(name, 0, 4, first=3)], 0)


@pytest.mark.parametrize("preset", ["sync", "bounded_async"])
def test_a_resumed_run_plans_the_same_restarts(tmp_path: Path, preset: Any) -> None:
    schedule = ScheduleSettings(preset=preset, batch=8, group=4, chunks=2, staleness=2, min_valid=1)
    replay = ReplaySettings(enabled=True, restart_share=0.5, probe_fraction=0, retire_after=99, pool_updates=0)

    def plans(folder: Path, steps: list[int]) -> list[Any]:
        planned: list[Any] = []
        for number, until in enumerate(steps):
            run, curriculum = make_replay_run(
                *(folder, schedule, replay), steps=6, problems=tasks(40), resume=number > 0, checkpoint_every=1
            )
            if not number:
                for name in range(12):
                    stored_run(curriculum.pool, f"hard-{name}")
            run.total_steps = until
            asyncio.run(asyncio.wait_for(train(run), 60))
            for step, groups, _ in run.observer.steps:
                planned.append((step, [(g.spec.task.id, len(g.spec.start)) for g in groups]))
            curriculum.pool.close()
        return planned

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = plans(tmp_path / "whole", [6])
    assert any(length for _, groups in whole for _, length in groups)
    if preset == "sync":
        assert plans(tmp_path / "parts", [2, 3, 6]) == whole
    else:
        assert [step for step, _ in plans(tmp_path / "parts", [2, 3, 6])] == [step for step, _ in whole]


def test_a_household_of_alfworld_is_restarted_from_the_expert_s_turns() -> None:
    pytest.importorskip("alfworld")
    from gleanrl.environments.alfworld import AlfworldTaskset
    from gleanrl.learners.tiny import build_tokenizer
    from gleanrl.rollout.renderer import Renderer

    taskset = AlfworldTaskset()
    task = taskset.tasks("train", 1)[0]
    messages, score = taskset.demonstrate(task, seed=0)
    assert Score.of(score).value == 1.0
    r = Renderer(build_tokenizer([message["content"] for message in messages], 2048))
    whole = r.demonstration(messages)
    said = [turn for turn in whole if turn.sampled]
    for turns in (1, len(said) - 1):
        rest = iter(said[turns:])
        sampler = ScriptedSampler(lambda *_, rest=rest: next(rest).tokens.tolist())
        player = Player(taskset.environment, sampler, r, ContextSettings(max_turns=30), 1.0, max_context=4096)
        played = asyncio.run(player.play(task, trajectory_id="t", seed=1, start=beginning(whole, turns)))
        assert played.info[START_TURNS] == turns
        assert played.score.value == 1.0
        assert sum(1 for _ in played.sampled_turns()) == len(said) - turns
