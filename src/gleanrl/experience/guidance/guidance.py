"""Guidance: some members of a group are shown what worked on similar tasks.

Guidance has three parts, which a `Guide` makes and which are invisible to the training loop. A curriculum marks in each
plan which fresh members are guided: the last ones, so that groups stay in order. A player puts the text into the
opening of exactly those episodes. Before a batch is made, members whose guidance is to be discarded get the opening
that they would have had without guidance. Their log-probs remain those under the guided prompt, so they are off-policy
and are treated as replayed members of their group: clipped in the same way, and not part of the baseline.
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
from gleanrl.protocols import Curriculum, Environment, Metrics, Observation, Tools
from gleanrl.rollout.conversation import opening_turns, with_prompt
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import Group, GroupSpec, Message, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive

log = logging.getLogger(__name__)

MARK = "gleanrl.guidance"  # key in a task's payload under which a plan marks a group for the player
GUIDANCE_FILE = "guidance.jsonl"  # file in the run folder with the texts that BM25 searches
LEAST_BASELINE = 2  # on-policy members that a group needs for a baseline

Mode = Literal["keep", "discard"]


class Marked(TypedDict):
    """Which members of a group are guided (``start`` to ``stop``), and whether training keeps the text (``mode``)."""

    start: int
    stop: int
    mode: Mode


def load_retriever(settings: GuidanceSettings, folder: Path | None) -> Retriever:
    """Return the retriever that the settings name. bm25 keeps its texts in ``folder``. Raises `UserError`."""
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
    """Check that the retriever named in ``settings`` exists and takes the options given there, without making it.

    Raises:
        UserError: no such retriever, or an option that it does not take or lacks.
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
    return known.get(settings.retriever) or load_object(settings.retriever)


@dataclass
class _SharedText:
    """The text of one group, shared by all of its guided members."""

    members: int  # number of members whose episodes are not over
    text: asyncio.Future[str | None] | None = None


class Guide:
    """Adds guidance to a run: wraps its curriculum and its player, and prepares groups for training.

    If the retriever fails or finds nothing, the group gets no guidance and the failure is counted, but the run
    continues. ``success_threshold``: trajectories with at least this score are stored in the retriever.
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
        self._texts: dict[str, _SharedText] = {}  # texts by the group's id
        self._failing = False

    def curriculum(self, inner: Curriculum) -> GuidedCurriculum:
        return GuidedCurriculum(inner, self)

    def player(self, player: Player) -> GuidedPlayer:
        return GuidedPlayer(**{f.name: getattr(player, f.name) for f in fields(player)}, guide=self)

    def strip(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups in the form for training: without marks, and without guidance that is to be discarded.

        Members whose guidance is discarded are off-policy, so they become replayed members. The order of all members
        does not change.
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
        """Give access to the text that a group's guided members share. Each member enters once, for its episode."""
        shared = self._texts.setdefault(group, _SharedText(members))
        try:
            yield shared
        finally:
            shared.members -= 1
            if not shared.members:
                del self._texts[group]

    async def find_text(self, task: Task, room: int, tools: Tools) -> str | None:
        """Find the text that a group is shown; None if there is none.

        ``task.prompt`` holds the messages that the group's first episode opens with. ``room``: tokens of the model's
        context.
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
        if not self._failing:  # a service that is down is logged once
            log.warning("no guidance: %s: %s", type(error).__name__, error)
        self._failing = True


# --- playing ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedPlayer(Player):
    """Plays marked members with experience in their opening, and all others as `Player` does.

    The info of a guided trajectory holds ``guided`` (keep or discard) and ``unguided``: the original message, without
    the text that was put into it.
    """

    guide: Guide

    async def play(self, task: Task, *, trajectory_id: str, seed: int, temperature: float | None = None) -> Trajectory:
        """Play an episode as `Player.play` does. The number at the end of ``trajectory_id`` is its member."""
        mark: Marked | None = task.payload.get(MARK)
        task = unmark(task)
        group, _, member = trajectory_id.rpartition(".")
        if mark is None or not mark["start"] <= int(member) < mark["stop"]:
            return await Player.play(self, task, trajectory_id=trajectory_id, seed=seed, temperature=temperature)
        made: list[GuidedEnvironment] = []
        with self.guide.share_text(group, mark["stop"] - mark["start"]) as shared:

            def environment(opened: Task) -> Environment:
                inner = self.environment(task)
                made.append(GuidedEnvironment(inner, self.guide, shared, task, self.max_context))
                return made[-1]

            player = replace(self, environment=environment)
            bare = replace(task, prompt=())  # the environment opens with the prompt, text included
            played = await Player.play(player, bare, trajectory_id=trajectory_id, seed=seed, temperature=temperature)
        # A lost episode is started again in a new environment, so the trajectory comes from the last one.
        if not made or made[-1].unguided is None:
            return played
        return replace(played, info={**played.info, "guided": mark["mode"], "unguided": made[-1].unguided})


@dataclass
class GuidedEnvironment(Environment):
    """Wraps an environment and puts experience into its opening."""

    inner: Environment
    guide: Guide
    shared: _SharedText
    task: Task
    room: int  # tokens of the model's context
    unguided: str | None = field(default=None, init=False)

    async def reset(self) -> Observation:
        observation = await self.inner.reset()
        opening = (*self.task.prompt, *observation.messages)
        asked = next((m["content"] for m in reversed(opening) if m["role"] == "user"), None)
        if asked is not None and not observation.done:
            if self.shared.text is None:
                find = self.guide.find_text(replace(self.task, prompt=opening), self.room, observation.tools)
                self.shared.text = asyncio.ensure_future(find)
            text = await asyncio.shield(self.shared.text)  # not cancelled with this member: others wait for it too
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


# --- planning and remembering -----------------------------------------------------------------------
class GuidedCurriculum:
    """Wraps another curriculum, such as the replay curriculum, and marks its plans.

    The inner curriculum sees neither the marks nor members whose guidance is discarded, because such members do not
    show how the policy does without guidance.
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

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Store each group's shortest success. Returns the inner curriculum's metrics and ``guidance/...``."""
        guide = self._guide
        unmarked: list[Group] = []  # groups without marks and without members whose guidance is discarded
        guided: list[Trajectory] = []
        unguided: list[Trajectory] = []  # unguided members of groups that have guided ones
        guided_groups = 0
        for group in groups:
            task = unmark(group.spec.task)
            solved = [t for t in group.valid_fresh if t.score.value >= guide.success_threshold]
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
            **self.inner.observe(unmarked),
            "guidance/groups": float(guided_groups),
            "guidance/members": float(len(guided)),
            "guidance/discarded": float(sum(t.info["guided"] == "discard" for t in guided)),
        }
        for name in ("failed", "empty", "too_long"):
            metrics[f"guidance/{name}"] = float(guide.counts[name])
        for name, members in (("guided", guided), ("unguided", unguided)):
            if members:
                rate = np.mean([t.score.value >= guide.success_threshold for t in members])
                metrics[f"guidance/solve_rate_{name}"] = float(rate)
        for name, value in guide.retriever.metrics().items():
            metrics[f"guidance/{name}"] = value
        guide.counts.clear()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "mark": self._guide.retriever.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self._guide.retriever.rewind(state["mark"])


# --- pure functions -----------------------------------------------------------------------------------
def insert(template: str, messages: Sequence[Message], experience: str) -> list[Message]:
    """Put ``experience`` into the last user message as ``template`` says. Raises ValueError without such a message."""
    prompt = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    before, _, after = template.partition("{prompt}")  # not str.format: texts may contain braces
    before, after = (part.replace("{experience}", experience) for part in (before, after))
    return with_prompt(messages, before + prompt + after)


def unmark(task: Task) -> Task:
    """Return the task without its mark."""
    if MARK not in task.payload:
        return task
    return replace(task, payload={key: value for key, value in task.payload.items() if key != MARK})


def strip_trajectory(trajectory: Trajectory, renderer: Renderer) -> Trajectory:
    """Return the trajectory with its opening replaced, in every segment, by the one that it has without guidance.

    Sampled turns keep their token ids and log-probs, which are those under the guided prompt. Raises ValueError if a
    segment does not begin with the opening.
    """
    opening = opening_turns(trajectory)
    if not opening:
        return trajectory
    messages = with_prompt([turn.message for turn in opening], trajectory.info["unguided"])
    plain = tuple(renderer.with_tools(trajectory.info.get("tools", ())).start(messages))
    segments = []
    for segment in trajectory.segments:
        shown = segment[: len(opening)]
        same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(shown, opening, strict=False)]
        if len(shown) < len(opening) or not all(same):
            raise ValueError(f"trajectory {trajectory.id!r}: a segment does not begin with the opening")
        segments.append((*plain, *segment[len(opening) :]))
    info = {key: value for key, value in trajectory.info.items() if key != "unguided"}
    return replace(trajectory, segments=tuple(segments), info={**info, "guided": "stripped"})


def _discards(trajectory: Trajectory) -> bool:
    return trajectory.info.get("guided") == "discard"
