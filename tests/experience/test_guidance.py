"""Tests of guidance through the real training loop: which members are shown experience, what of it is trained, and
that a failing retriever or environment does not stop a run."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.algorithms.batch import Batch, build
from gleanrl.config.settings import ContextSettings, CreditSettings, GuidanceSettings, LossSettings, ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.experience.guidance.guidance import (
    MARK,
    Guide,
    insert,
    load_retriever,
    strip_trajectory,
)
from gleanrl.experience.guidance.retrieval import Bm25Retriever, Retriever
from gleanrl.protocols import Completion, Observation, Reward
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout.context import make_context
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.checkpoints import restore
from gleanrl.train import Run, train
from gleanrl.types import Group, GroupSpec, Message, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from tests import loop_world
from tests.loop_world import GuessEnvironment, make_run, renderer, tasks
from tests.strategies import examples

GROUP = 6
TEMPLATE = "{experience} {prompt}"


@dataclass
class Hints(Retriever):
    """A retriever that returns ``text`` after ``delay`` seconds, or fails."""

    text: str = "right left"
    delay: float = 0.001
    fails: bool = False
    asked: list[Task] = field(default_factory=list)
    added: list[tuple[Task, Trajectory]] = field(default_factory=list)

    def add(self, task: Task, trajectory: Trajectory) -> None:
        self.added.append((task, trajectory))
        if self.fails:
            raise RuntimeError("no room")

    async def retrieve(self, task: Task, k: int) -> list[str]:
        self.asked.append(task)
        await asyncio.sleep(self.delay)
        if self.fails:
            raise ConnectionError("no answer")
        return [self.text] if self.text else []


class Inner(TaskStream):
    """A task stream that records the groups that it observes."""

    seen: tuple[Group, ...] = ()

    def observe(self, groups: Sequence[Group], training: Mapping[str, float]) -> dict[str, float]:
        self.seen += tuple(groups)
        return {"inner/groups": float(len(groups))}


def guided_run(
    folder: Path,
    retriever: Retriever,
    *,
    steps: int = 2,
    preset: str = "sync",
    context: ContextSettings | None = None,
    reward: Reward | None = None,
    resume: bool = False,
    **options: Any,
) -> tuple[Run, Inner, list[tuple[tuple[Group, ...], Batch]]]:
    """Return a run that is wrapped by a guide, its inner curriculum, and a list that collects what is trained."""
    schedule = ScheduleSettings(preset=preset, batch=4, group=GROUP, chunks=2)  # type: ignore[arg-type]
    run = make_run(folder, schedule, steps=steps, checkpoint_every=1, sample_delay=lambda seed, _: seed % 3 * 1e-4)
    guide = Guide(GuidanceSettings(**{"template": TEMPLATE, **options}), retriever, renderer(), seed=3)
    inner = Inner(tasks(6), GROUP, seed=1)
    run.plan = Plan(guide.curriculum(inner), schedule.batch)
    run.player = guide.player(run.player)
    run.rewards = guide.reward(run.rewards if reward is None else reward)
    if context is not None:
        run.player = replace(run.player, context=context)
    if resume:
        run.controller = restore(run.checkpoints.latest(), run.learner, run.plan, run.controller.schedule, steps)
        run.player.sampler._version = run.controller.version  # type: ignore[attr-defined]
    batches: list[tuple[tuple[Group, ...], Batch]] = []

    async def batch(groups: Sequence[Group]) -> Batch:
        ready = guide.strip(groups)
        made = build(ready, CreditSettings(estimator="dr_grpo"), LossSettings(), 128)
        batches.append((tuple(ready), made))
        return made

    run.make_batch = batch
    return run, inner, batches


def played(run: Run) -> list[Group]:
    return [group for _, groups, _ in run.observer.steps for group in groups]  # type: ignore[attr-defined]


def opening(trajectory: Trajectory) -> str:
    return trajectory.segments[0][0].message["content"]


@pytest.mark.parametrize("preset", ["sync", "pipelined_one_step_off", "bounded_async"])
@pytest.mark.parametrize(("share", "members"), [(0.5, 3), (0.34, 2), (1.0, 4), (0.0, 0)])
def test_discarded_guidance_is_seen_by_the_sampler_and_not_trained(
    tmp_path: Path, preset: str, share: float, members: int
) -> None:
    hints = Hints()
    run, inner, batches = guided_run(tmp_path, hints, preset=preset, guided_share=share, mode="discard")
    ticket, started = run.controller.ticket, []

    async def counted() -> Any:
        started.append(await ticket())
        return started[-1]

    run.controller.ticket = counted  # type: ignore[method-assign]
    asyncio.run(train(run))
    groups = played(run)
    assert len(groups) == 8
    assert len(hints.asked) == (len(started) - started.count(None) if members else 0)  # one look-up a group
    for group in groups:
        shown = [opening(t) for t in group.fresh]
        assert shown == ["say left or right"] * (GROUP - members) + ["right left say left or right"] * members
        assert [t.info.get("guided") for t in group.fresh] == [None] * (GROUP - members) + ["discard"] * members
    for groups_trained, batch in batches:
        for group in groups_trained:
            original = next(g for g in groups if g.ticket == group.ticket)
            assert MARK not in group.spec.task.payload
            assert len(group.fresh) == GROUP - members
            for before, after in zip(original.trajectories, group.trajectories, strict=True):
                assert before.id == after.id
                plain = group.fresh[0].segments[0][0].tokens
                assert np.array_equal(after.segments[0][0].tokens, plain)  # what an unguided member was shown
                for a, b in zip(before.turns(), after.turns(), strict=True):
                    assert a is b or (not a.sampled and not b.sampled)
        replayed = [sample.off_policy for part in batch.parts for sample in part.samples]
        assert replayed == ([False] * (GROUP - members) + [True] * members) * batch.groups
    assert all(MARK not in g.spec.task.payload and len(g.trajectories) == GROUP - members for g in inner.seen)
    metrics = run.observer.steps[-1][2]  # type: ignore[attr-defined]
    assert metrics["guidance/members"] == metrics["guidance/discarded"] == 4 * members
    assert metrics["inner/groups"] == 4


def test_kept_guidance_is_trained_as_it_was_shown(tmp_path: Path) -> None:
    run, inner, batches = guided_run(tmp_path, Hints(), guided_share=1.0, mode="keep")
    asyncio.run(train(run))
    assert all(opening(t) == "right left say left or right" for g in played(run) for t in g.fresh)
    assert all(not sample.off_policy for _, batch in batches for sample in batch.samples)
    assert [g.trajectories for groups, _ in batches for g in groups] == [g.trajectories for g in played(run)]
    assert [g.trajectories for g in inner.seen] == [g.trajectories for g in played(run)]


def test_mixed_mode_uses_one_mode_for_all_groups_of_a_task(tmp_path: Path) -> None:
    run, _, _ = guided_run(tmp_path, Hints(), steps=4, mode="mixed", keep_share=0.5)
    asyncio.run(train(run))
    modes: dict[str, set[str]] = {}
    for group in played(run):
        modes.setdefault(group.spec.task.id, set()).update(t.info["guided"] for t in group.fresh if "guided" in t.info)
    assert all(len(found) == 1 for found in modes.values())
    assert {mode for found in modes.values() for mode in found} == {"keep", "discard"}


@pytest.mark.parametrize(
    ("retriever", "count"),
    [
        (Hints(fails=True), "failed"),
        (Hints(delay=9), "failed"),
        (Hints(text=""), "empty"),
        (Hints(text="x" * 90), "too_long"),
    ],
)
def test_without_retrieved_experience_the_run_continues_unguided_and_counts_the_cause(
    tmp_path: Path, retriever: Hints, count: str, caplog: pytest.LogCaptureFixture
) -> None:
    patience = 0.02 if retriever.delay > 1 else 60.0  # a busy machine may take its time to answer
    run, _, batches = guided_run(tmp_path, retriever, timeout_s=patience)
    asyncio.run(train(run))
    assert run.step == 2
    assert all(opening(t) == "say left or right" and "guided" not in t.info for g in played(run) for t in g.fresh)
    assert all(not sample.off_policy for _, batch in batches for sample in batch.samples)
    assert run.observer.steps[0][2][f"guidance/{count}"] >= 4  # type: ignore[attr-defined]
    assert len([r for r in caplog.records if "no guidance" in r.message]) == (count == "failed")


def test_a_broken_environment_makes_only_its_member_invalid(tmp_path: Path) -> None:
    @dataclass
    class SometimesBroken(GuessEnvironment):
        async def reset(self) -> Observation:
            made.append(1)
            if len(made) % 5 == 0:
                raise RuntimeError("broken")
            return await super().reset()

    made: list[int] = []
    run, _, batches = guided_run(tmp_path, Hints())
    run.player = replace(run.player, environment=SometimesBroken)
    asyncio.run(train(run))
    invalid = [t for g in played(run) for t in g.fresh if not t.score.valid]
    assert len(invalid) == 8 * GROUP // 5
    assert sum(part.invalid for _, batch in batches for part in batch.parts) == len(invalid)


def test_a_success_of_each_solved_group_is_added_and_queries_contain_the_opening(tmp_path: Path) -> None:
    hints = Hints()
    run, _, _ = guided_run(tmp_path, hints)
    asyncio.run(train(run))
    solved = [g for g in played(run) if any(t.score.value == 1.0 for t in g.fresh)]
    assert [task.id for task, _ in hints.added] == [g.spec.task.id for g in solved]
    assert all(t.score.value == 1.0 for _, t in hints.added)
    assert all(MARK not in task.payload for task, _ in hints.added)
    assert all(task.prompt[0]["content"] == "say left or right" for task in hints.asked)


def test_the_reward_gets_the_payload_as_the_taskset_wrote_it(tmp_path: Path) -> None:
    payloads: list[Any] = []

    class Strict(EnvironmentReward):
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            payloads.append(task.payload)
            return await super().score(task, trajectory)

        async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
            payloads.append(task.payload)
            return await super().finish(task, scores)

    run, _, _ = guided_run(tmp_path, Hints(), reward=Strict())
    asyncio.run(train(run))
    assert any("guided" in t.info for group in played(run) for t in group.fresh)
    assert len(payloads) >= 8 * (GROUP + 1)
    written = [task.payload for task in tasks(6)]
    assert all(payload in written for payload in payloads)


def test_a_resumed_run_is_guided_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def shown(run: Run) -> list[Any]:
        return [(g.ticket, g.spec.task.id, [opening(t) for t in g.trajectories]) for g in played(run)]

    options: dict[str, Any] = {"mode": "keep", "prompt_share": 1.0}
    whole, _, _ = guided_run(tmp_path / "a", Bm25Retriever(tmp_path / "a.jsonl", same_task=True), steps=4, **options)
    asyncio.run(train(whole))
    assert any("> " in text for _, _, texts in shown(whole) for text in texts)
    first, _, _ = guided_run(tmp_path / "b", Bm25Retriever(tmp_path / "b.jsonl", same_task=True), steps=2, **options)
    asyncio.run(train(first))
    with (tmp_path / "b.jsonl").open("ab") as file:  # a step was under way when the process died
        file.write(json.dumps(["task-9", "say left or right", "never"]).encode() + b'\n["torn')
    retriever = Bm25Retriever(tmp_path / "b.jsonl", same_task=True)
    second, _, _ = guided_run(tmp_path / "b", retriever, steps=4, resume=True, **options)
    asyncio.run(train(second))
    assert shown(first) + shown(second) == shown(whole)


def test_the_baseline_is_computed_from_unguided_members() -> None:
    r = renderer()
    plain, guided = episode(r, ["left"], None), episode(r, ["left"], "right left")
    members = [replace(plain, id=f"{i}", score=Score(float(i == 0))) for i in range(4)]
    members += [replace(guided, id=f"g{i}", score=Score(1.0)) for i in range(2)]
    old = replace(plain, id="old", score=Score(1.0))
    task = Task("t", payload={"a": 1, MARK: {}})
    group = Group(GroupSpec(task, 6, (old,)), (*members, old), 0)
    guide = Guide(GuidanceSettings(), Hints(), r, seed=0)
    [ready] = guide.strip([group])
    assert [t.id for t in ready.fresh] == ["0", "1", "2", "3"]
    assert [t.id for t in ready.spec.replayed] == ["g0", "g1", "old"]
    assert ready.spec.task.payload == {"a": 1}
    batch = build([ready], CreditSettings(estimator="dr_grpo"), LossSettings(), 128)
    gains = [float(sample.advantages[sample.mask][0]) for sample in batch.samples]
    assert gains == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.75, 0.75, 0.75])
    alone = Group(GroupSpec(task, 2), tuple(members[4:]), 1)
    inner = Inner(tasks(1), 6, seed=1)
    guide.curriculum(inner).observe([group, alone], {})
    [seen] = inner.seen  # the other group has no unguided member
    assert [t.id for t in seen.trajectories] == ["0", "1", "2", "3", "old"]
    assert (seen.spec.fresh, seen.spec.task.payload) == (4, {"a": 1})
    [again] = guide.strip([ready])  # stripping twice changes nothing
    assert [a is b for a, b in zip(again.trajectories, ready.trajectories, strict=True)] == [True] * 7
    assert again.spec.fresh == 4


# --- discarding -------------------------------------------------------------------------------------
def episode(
    r: Renderer, answers: Sequence[str], experience: str | None, context: ContextSettings | None = None
) -> Trajectory:
    """Return the episode of these answers, each after an observation; ``experience`` is inserted into its prompt."""
    held = make_context(r, context or ContextSettings())
    first = [Message(role="user", content="say"), Message(role="user", content="left or right")]
    info: dict[str, Any] = {}
    if experience is not None:
        info = {"guided": "discard", "unguided": "left or right"}
        first = insert("{prompt} {experience}", first, experience)
    for i, text in enumerate(answers):
        held.observe(first if i == 0 else [Message(role="user", content="right")])
        ids = r.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = np.array([*ids, r.end_of_turn], np.int32)
        held.act(Completion(tokens, -np.arange(1, tokens.size + 1, dtype=np.float32), 3, "stop"))
    return Trajectory("e", "t", held.segments(), Score(1.0), StopReason.DONE, info)


@settings(max_examples=examples(40))
@given(
    answers=st.lists(st.sampled_from(["left", "right", "<think>left</think>right", "é{}"]), min_size=1, max_size=5),
    experience=st.text(min_size=1, max_size=20),
    policy=st.sampled_from(["linear", "window", "strip_thinking"]),
    system=st.sampled_from([None, "right"]),
    opens=st.booleans(),
)
def test_a_stripped_episode_equals_the_episode_without_guidance(
    answers: list[str], experience: str, policy: Any, system: str | None, opens: bool
) -> None:
    context = ContextSettings(policy=policy, window_turns=2, system_prompt=system)
    r = renderer()
    if opens:  # the generation prompt opens a thought
        tokenizer, prompt = copy.deepcopy(r.tokenizer), "{{ '<|assistant|>' }}"
        assert tokenizer.chat_template.count(prompt) == 1
        tokenizer.chat_template = tokenizer.chat_template.replace(prompt, "{{ '<|assistant|><think>' }}")
        r = Renderer(tokenizer)
        assert r.opened_thought.size
    guided, plain = episode(r, answers, experience, context), episode(r, answers, None, context)
    found = strip_trajectory(guided, r)
    assert found.info == {"guided": "stripped"}
    assert len(found.segments) == len(plain.segments)
    for a, b in zip(found.turns(), plain.turns(), strict=True):
        assert a.message == b.message
        assert np.array_equal(a.tokens, b.tokens)
        assert a.version == b.version
        assert (a.logprobs is None) == (b.logprobs is None)
        assert a.logprobs is None or np.array_equal(a.logprobs, b.logprobs)


def test_stripping_a_segment_with_another_opening_raises_a_value_error() -> None:
    r = renderer()
    guided = episode(r, ["left", "right", "left", "left"], "x", ContextSettings(policy="window", window_turns=1))
    with pytest.raises(ValueError, match="does not begin with the opening"):
        strip_trajectory(replace(guided, segments=(guided.segments[0], guided.segments[1][1:])), r)


# --- settings ---------------------------------------------------------------------------------------
def test_texts_with_braces_are_inserted_verbatim() -> None:
    made = insert("{{{experience}}} {prompt}", [Message(role="user", content="do {experience}")], "say {prompt}")
    assert made[0]["content"] == "{{say {prompt}}} do {experience}"
    with pytest.raises(ValueError, match=r"\{experience\} once"):
        GuidanceSettings(template="{prompt}")


def test_a_retriever_is_loaded_by_name_or_path_and_invalid_ones_raise_a_user_error(tmp_path: Path) -> None:
    assert isinstance(load_retriever(GuidanceSettings(), tmp_path), Bm25Retriever)
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, depth): self.depth = depth\n"
        "    def add(self, task, trajectory): ...\n    async def retrieve(self, task, k): ...\n"
    )
    mine = GuidanceSettings(retriever=f"{tmp_path}/mine.py:Mine", options={"depth": 3})
    assert vars(load_retriever(mine, None)) == {"depth": 3}
    for settings_, said in [
        (GuidanceSettings(retriever="bm52"), "use bm25, reme or an import path"),
        (GuidanceSettings(options={"colour": 1}), "colour"),
        (GuidanceSettings(retriever="reme"), "url"),
        (GuidanceSettings(retriever="reme", options={"url": "localhost:8002"}), "give an address"),
    ]:
        with pytest.raises(UserError, match=said):
            load_retriever(settings_, None)


def test_tasks_without_guidance_are_played_as_by_the_plain_player(tmp_path: Path) -> None:
    """Evaluation uses the same player, with its own trajectory ids and tasks."""
    run, _, _ = guided_run(tmp_path, Hints())
    task = loop_world.tasks(1)[0]
    ours = asyncio.run(run.player.play(task, trajectory_id="eval", seed=1))
    theirs = asyncio.run(
        make_run(tmp_path / "x", run.settings, steps=1).player.play(task, trajectory_id="eval", seed=1)
    )
    assert [t.tokens.tolist() for t in ours.turns()] == [t.tokens.tolist() for t in theirs.turns()]


def test_the_retriever_of_the_docs_guides_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "guidance.md").read_text()
    (tmp_path / "mine.py").write_text(page.split('```python title="mine.py"\n')[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    retriever = load_retriever(GuidanceSettings(retriever="mine.py:Newest"), None)
    run, _, _ = guided_run(tmp_path, retriever, mode="keep")
    asyncio.run(train(run))
    assert any("guided" in t.info for g in played(run) for t in g.fresh)
