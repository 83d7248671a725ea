"""Guidance: inserts a text about successes on similar tasks into the prompt of some members of each group.

A `Guide` adds guidance to a run in four places. The training loop itself does not change.

1. `GuidedCurriculum` wraps the curriculum. In the payload of each planned task, it marks which fresh members of the
   group are guided. These are always the last fresh ones.
2. `GuidedPlayer` replaces the player. For the marked members it retrieves a text and inserts it into the last user
   message before the first sampled turn (the messages before that turn are the *opening* of the episode).
3. `GuidedReward` wraps the reward, so that the reward gets each task without the mark.
4. `Guide.strip` prepares finished groups for training. With the mode ``keep``, the text stays in the prompt. With
   ``discard``, the opening is replaced by the one without the text. The log-probs of such a member remain those under
   the guided prompt, so the member is off-policy. It becomes a replayed member of its group: its ratio is clipped like
   theirs, and its score does not enter the baseline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from gleanrl.config.settings import GuidanceSettings
from gleanrl.experience.guidance.retrieval import Bm25Retriever, Retriever
from gleanrl.experience.interop.reme import ReMeRetriever
from gleanrl.protocols import Curriculum, Environment, Metrics, Observation, Reward, Tools
from gleanrl.rollout.conversation import opening_turns, with_prompt
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import Group, GroupSpec, Message, Score, Segment, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive

log = logging.getLogger(__name__)

MARK = "gleanrl.guidance"  # key in a task's payload under which the curriculum stores a `Marked` for the player
GUIDANCE_FILE = "guidance.jsonl"  # file in the run folder in which `Bm25Retriever` stores its texts
LEAST_BASELINE = 2  # smallest number of on-policy members from which a group's baseline can be computed

Mode = Literal["keep", "discard"]


class Marked(TypedDict):
    """Says which members of a group are guided: those with an index from ``start`` up to, but not including, ``stop``.

    ``mode`` says whether training keeps the text in the prompt.
    """

    start: int
    stop: int
    mode: Mode


def load_retriever(settings: GuidanceSettings, folder: Path | None) -> Retriever:
    """Create the retriever that the settings name. The retriever bm25 stores its texts in ``folder`` (None: in memory).

    Raises:
        UserError: there is no such retriever, or it does not accept the options.
    """
    make, options = _find_retriever(settings), dict(settings.options)
    try:
        if settings.retriever == "bm25":
            if isinstance(summarise := options.get("summarise"), str):
                options["summarise"] = load_object(summarise)
            return make(folder / GUIDANCE_FILE if folder else None, **options)
        return make(**options)
    except TypeError as error:
        raise UserError(f"guidance.options: {settings.retriever}: {error}") from error


def check(settings: GuidanceSettings) -> None:
    """Check that the retriever named in ``settings`` exists and accepts the options given there, without creating it.

    Raises:
        UserError: there is no such retriever, it lacks a method, it does not accept an option, or a required option is
            missing.
    """
    make = _find_retriever(settings)
    try:
        inspect.signature(make).bind(*([None] if settings.retriever == "bm25" else []), **settings.options)
    except TypeError as error:
        raise UserError(f"guidance.options: {settings.retriever}: {error}") from None


def _find_retriever(settings: GuidanceSettings) -> Any:
    known = {"bm25": Bm25Retriever, "reme": ReMeRetriever}
    if settings.retriever not in known and ":" not in settings.retriever:
        raise UserError(f"guidance.retriever = {settings.retriever!r}: use bm25, reme or an import path")
    return known.get(settings.retriever) or load_object(settings.retriever, Retriever)


@dataclass
class _SharedText:
    """The retrieved text of one group. All guided members of the group use the same text, which is retrieved once."""

    members: int  # number of guided members whose episodes have not ended
    text: asyncio.Future[str | None] | None = None  # None until the first member starts the retrieval


class Guide:
    """Adds guidance to a run: wraps its curriculum, player and reward, and prepares its groups for training.

    If the retriever fails or finds nothing, this is counted, the members of the group are played without guidance, and
    the run continues. A trajectory counts as a success if its score is at least ``success_threshold``; only successes
    are given to the retriever.
    """

    def __init__(
        self,
        settings: GuidanceSettings,
        retriever: Retriever,
        renderer: Renderer,
        *,
        seed: int,
        success_threshold: float = 0.5,
    ) -> None:
        self.settings, self.retriever = settings, retriever
        self.seed, self.success_threshold = seed, success_threshold
        self.counts: Counter[str] = Counter()  # failures by kind since the last step
        self._renderer = renderer
        self._texts: dict[str, _SharedText] = {}  # text of each group that is being played, by the group's id
        self._failing = False

    def curriculum(self, inner: Curriculum) -> GuidedCurriculum:
        return GuidedCurriculum(inner, self)

    def player(self, player: Player) -> GuidedPlayer:
        return GuidedPlayer(**{f.name: getattr(player, f.name) for f in fields(player)}, guide=self)

    def reward(self, inner: Reward) -> GuidedReward:
        return GuidedReward(inner)

    def strip(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups as training needs them: without marks, and without texts that are to be discarded.

        A member whose text is discarded is off-policy afterwards, so it becomes a replayed member. The order of the
        members does not change, because the guided members are the last fresh ones.
        """
        stripped: list[Group] = []
        for group in groups:
            fresh = [strip_trajectory(t, self._renderer) if _discards(t) else t for t in group.fresh]
            kept = next((i for i, t in enumerate(group.fresh) if _discards(t)), len(fresh))
            replayed = (*fresh[kept:], *group.spec.replayed)
            spec = replace(group.spec, task=unmark(group.spec.task), fresh=kept, replayed=replayed)
            stripped.append(replace(group, spec=spec, trajectories=(*fresh[:kept], *replayed)))
        return stripped

    async def close(self) -> None:
        await self.retriever.close()

    @contextmanager
    def share_text(self, group: str, members: int) -> Iterator[_SharedText]:
        """Yield the shared text of the group with the id ``group``, for the episode of one guided member.

        ``members`` is the number of guided members of the group. Each of them enters this context once. The text is
        deleted when the last member has left the context.
        """
        shared = self._texts.setdefault(group, _SharedText(members))
        try:
            yield shared
        finally:
            shared.members -= 1
            if not shared.members:
                del self._texts[group]

    async def find_text(self, task: Task, room: int, tools: Tools) -> str | None:
        """Retrieve up to ``k`` texts for a group and return them as one text, separated by empty lines.

        ``task.prompt`` must hold the whole opening of an episode, because the retriever searches by it. ``room`` is the
        length of the model's context in tokens. While the opening with the inserted texts is longer than
        ``prompt_share * room`` tokens, the last text is removed. Returns None if no text is left, if the retriever
        finds none, or if it fails.
        """
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                found = await self.retriever.retrieve(task, self.settings.k)
            texts = [text for text in found if text.strip()][: self.settings.k]
        except Exception as error:
            self.report_failure(error)
            return None
        self._failing = False
        if not texts:
            self.counts["empty"] += 1
        while texts:
            shown = "\n\n".join(texts)
            guided = self._renderer.with_tools(tools).start(insert(self.settings.template, task.prompt, shown))
            if sum(turn.tokens.size for turn in guided) <= room * self.settings.prompt_share:
                return shown
            texts.pop()
            self.counts["too_long"] += 1
        return None

    def report_failure(self, error: Exception) -> None:
        self.counts["failed"] += 1
        if not self._failing:  # log only the first of several failures in a row, for example while a service is down
            log.warning("no guidance: %s: %s", type(error).__name__, error)
        self._failing = True


# --- playing ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedPlayer(Player):
    """Plays marked members with the retrieved text in their opening, and all other members as `Player` does.

    In the info of a guided trajectory, ``guided`` is the mode ("keep" or "discard"), and ``unguided`` is the user
    message as it was before the text was inserted.
    """

    guide: Guide

    async def play(
        self,
        task: Task,
        *,
        trajectory_id: str,
        seed: int,
        temperature: float | None = None,
        start: Segment = (),
    ) -> Trajectory:
        """Play an episode as `Player.play` does.

        ``trajectory_id`` must have the form "GROUP.MEMBER". The `Marked` in the task's payload says whether this
        member is guided.
        """
        mark: Marked | None = task.payload.get(MARK)
        task = unmark(task)
        group, _, member = trajectory_id.rpartition(".")
        if mark is None or not mark["start"] <= int(member) < mark["stop"]:
            return await Player.play(
                self, task, trajectory_id=trajectory_id, seed=seed, temperature=temperature, start=start
            )
        made: list[GuidedEnvironment] = []
        with self.guide.share_text(group, mark["stop"] - mark["start"]) as shared:

            def environment(opened: Task) -> Environment:
                inner = self.environment(task)
                made.append(GuidedEnvironment(inner, self.guide, shared, task, self.max_context))
                return made[-1]

            player = replace(self, environment=environment)
            # `GuidedEnvironment` returns the prompt, with the text, as part of its first observation. So the player
            # must not add the prompt again.
            bare = replace(task, prompt=())
            played = await Player.play(player, bare, trajectory_id=trajectory_id, seed=seed, temperature=temperature)
        # If the process that holds an environment dies (`EpisodeLost`), the player starts the episode again in a new
        # environment. So the trajectory comes from the last environment that was made.
        if not made or made[-1].unguided is None:
            return played
        return replace(played, info={**played.info, "guided": mark["mode"], "unguided": made[-1].unguided})


@dataclass
class GuidedEnvironment(Environment):
    """Wraps an environment, and inserts the group's text into the opening that `reset` returns."""

    inner: Environment
    guide: Guide
    shared: _SharedText
    task: Task  # the task, without the `Marked` in its payload
    room: int  # length of the model's context in tokens
    unguided: str | None = field(default=None, init=False)  # original user message; None = no text was inserted

    async def reset(self) -> Observation:
        observation = await self.inner.reset()
        opening = (*self.task.prompt, *observation.messages)
        asked = next((m["content"] for m in reversed(opening) if m["role"] == "user"), None)
        if asked is not None and not observation.done:
            if self.shared.text is None:
                find = self.guide.find_text(replace(self.task, prompt=opening), self.room, observation.tools)
                self.shared.text = asyncio.ensure_future(find)
            # Other members wait for the same retrieval, so it must not be cancelled if this member is cancelled.
            text = await asyncio.shield(self.shared.text)
            if text is not None:
                opening = tuple(insert(self.guide.settings.template, opening, text))
                self.unguided = asked
        return replace(observation, messages=opening)

    async def step(self, message: Message) -> Observation:
        return await self.inner.step(message)

    async def conclude(self, stop: StopReason) -> Score | None:
        return await self.inner.conclude(stop)

    async def close(self) -> None:
        await self.inner.close()


# --- scoring ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GuidedReward:
    """Wraps a reward. A reward reads the payload as the task set wrote it, and its key in a journal contains it."""

    inner: Reward

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return await self.inner.score(unmark(task), trajectory)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return await self.inner.finish(unmark(task), scores)


# --- planning, and storing successes -----------------------------------------------------------------
class GuidedCurriculum:
    """Wraps another curriculum, such as `ReplayCurriculum`, and marks in its specs which members are guided.

    When it observes groups, it passes them to the inner curriculum without the marks and without members whose text is
    discarded. The scores of such members do not measure how well the policy solves the task without the text.
    """

    def __init__(self, inner: Curriculum, guide: Guide) -> None:
        self.inner, self._guide = inner, guide

    async def propose(self, count: int) -> list[GroupSpec]:
        settings = self._guide.settings
        specs: list[GroupSpec] = []
        for spec in await self.inner.propose(count):
            keeps = derive(self._guide.seed, "guidance", spec.task.id) < settings.keep_share * 2.0**63
            mode: Mode = "keep" if keeps else "discard"
            if settings.mode != "mixed":
                mode = settings.mode
            members = int(spec.fresh * settings.guided_share + 1e-9)
            if mode == "discard":
                members = min(members, spec.fresh - LEAST_BASELINE)
            if members >= 1:
                mark = Marked(start=spec.fresh - members, stop=spec.fresh, mode=mode)
                spec = replace(spec, task=replace(spec.task, payload={**spec.task.payload, MARK: mark}))
            specs.append(spec)
        return specs

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        """Give each group's shortest success to the retriever, and let the inner curriculum observe the groups.

        Returns the metrics of the inner curriculum, and ``guidance/...``.
        """
        guide = self._guide
        unmarked: list[Group] = []  # groups without marks and without members whose text is discarded
        guided: list[Trajectory] = []
        unguided: list[Trajectory] = []  # unguided members of those groups that also have guided members
        guided_groups = 0
        for group in groups:
            task = unmark(group.spec.task)
            solved = [t for t in group.valid_fresh if t.score.reaches(guide.success_threshold)]
            if solved:
                try:
                    guide.retriever.add(task, min(solved, key=lambda t: t.sampled_tokens))
                except Exception as error:
                    guide.report_failure(error)
            shown = [t for t in group.valid_fresh if "guided" in t.info]
            if shown:
                guided_groups += 1
                guided += shown
                unguided += [t for t in group.valid_fresh if "guided" not in t.info]
            fresh = [t for t in group.fresh if not _discards(t)]
            if fresh or group.spec.replayed:
                spec = replace(group.spec, task=task, fresh=len(fresh))
                unmarked.append(replace(group, spec=spec, trajectories=(*fresh, *group.spec.replayed)))
        metrics = {
            **self.inner.observe(unmarked, training),
            "guidance/groups": float(guided_groups),
            "guidance/members": float(len(guided)),
            "guidance/discarded": float(sum(t.info["guided"] == "discard" for t in guided)),
        }
        for name in ("failed", "empty", "too_long"):
            metrics[f"guidance/{name}"] = float(guide.counts[name])
        for name, members in (("guided", guided), ("unguided", unguided)):
            if members:
                rate = np.mean([t.score.reaches(guide.success_threshold) for t in members])
                metrics[f"guidance/solve_rate_{name}"] = float(rate)
        for name, value in guide.retriever.metrics().items():
            metrics[f"guidance/{name}"] = value
        guide.counts.clear()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "guidance": self._guide.retriever.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({name: value for name, value in state.items() if name != "guidance"})
        self._guide.retriever.rewind(state["guidance"])


# --- pure functions -----------------------------------------------------------------------------------
def insert(template: str, messages: Sequence[Message], experience: str) -> list[Message]:
    """Return the messages with ``template``, filled with ``experience``, in place of the last user message.

    ``{prompt}`` in the template stands for that message. Raises `ValueError` if there is no user message.
    """
    prompt = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    before, _, after = template.partition("{prompt}")  # str.format would fail on braces in texts
    before, after = (part.replace("{experience}", experience) for part in (before, after))
    return with_prompt(messages, before + prompt + after)


def unmark(task: Task) -> Task:
    """Return the task without the mark in its payload."""
    if MARK not in task.payload:
        return task
    return replace(task, payload={key: value for key, value in task.payload.items() if key != MARK})


def strip_trajectory(trajectory: Trajectory, renderer: Renderer) -> Trajectory:
    """Replace the opening of a guided trajectory, in every segment, by the opening without the inserted text.

    Sampled turns keep their token ids and their log-probs, which remain those under the guided prompt. Raises
    `ValueError` if a segment does not begin with the opening.
    """
    opening = opening_turns(trajectory)
    if not opening:
        return trajectory
    messages = with_prompt([turn.message for turn in opening], trajectory.info["unguided"])
    plain = tuple(renderer.with_tools(trajectory.info.get("tools", ())).start(messages))
    # Both openings as later segments have them with the context policy strip_thinking: without the opened thought.
    thought = renderer.opened_thought.size
    cut_opening, cut_plain = (_cut(turns, thought) for turns in (opening, plain))
    segments = []
    for segment in trajectory.segments:
        if _begins_with(segment, opening):
            begins = plain
        elif _begins_with(segment, cut_opening):
            begins = cut_plain
        else:
            raise ValueError(f"trajectory {trajectory.id!r}: a segment does not begin with the opening")
        segments.append((*begins, *segment[len(opening) :]))
    info = {key: value for key, value in trajectory.info.items() if key != "unguided"}
    return replace(trajectory, segments=tuple(segments), info={**info, "guided": "stripped"})


def _cut(turns: Segment, count: int) -> Segment:
    """Return the turns without the last ``count`` tokens of the last one."""
    last = turns[-1]
    return (*turns[:-1], replace(last, tokens=last.tokens[: last.tokens.size - count], body=None))


def _begins_with(segment: Segment, turns: Segment) -> bool:
    same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(segment, turns, strict=False)]
    return len(same) == len(turns) and all(same)


def _discards(trajectory: Trajectory) -> bool:
    return trajectory.info.get("guided") == "discard"
