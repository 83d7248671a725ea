"""The adapter of verifiers: tasks, episodes, rewards, tools and harnesses. Needs the package (make verifiers).

verifiers runs its own rollouts and scoring; the adapter supplies the model's messages.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import ContextSettings, EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Environment, Observation, Taskset
from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import Message, StopReason, Task
from gleanrl.utils.errors import UserError
from tests.rollout.test_tool_templates import tokenizer

if find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed in this environment: make verifiers", allow_module_level=True)

pytestmark = pytest.mark.verifiers

HERE = Path(__file__).parent
SUMS = str(HERE / "verifiers_sums.py")
PROMPT = "Answer with a number."


def sums(**options: Any) -> Taskset:
    return taskset({"id": SUMS, **options})


def taskset(options: dict[str, Any]) -> Taskset:
    return load_taskset(EnvironmentSettings(name="verifiers", options=options), seed=0)


def said(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


def play_episode(source: Taskset, task: Task, *answers: str | Message) -> list[Observation]:
    """Play an episode with these messages, and return the observations."""

    async def talk() -> list[Observation]:
        environment = source.environment(task)
        try:
            messages = [said(answer) if isinstance(answer, str) else answer for answer in answers]
            return [await environment.reset(), *[await environment.step(message) for message in messages]]
        finally:
            await environment.close()

    return asyncio.run(talk())


def answer_of(task: Task) -> str:
    return task.payload["data"]["answer"]


# --- tasks ----------------------------------------------------------------------------------------------
def test_ids_are_computed_from_the_content_of_tasks_and_splits_share_none() -> None:
    splits = {split: sums().tasks(split, 20) for split in ("train", "warm_start", "eval")}
    marks = [task.id for tasks in splits.values() for task in tasks]
    assert len(set(marks)) == 60
    later = {task.id: answer_of(task) for task in sums(args={"first": 7}).tasks("eval", 20)}
    known = {task.id: answer_of(task) for task in splits["eval"]}
    assert len(later.keys() & known.keys()) >= 15
    assert all(known[mark] == later[mark] for mark in later.keys() & known.keys())
    assert all(len(task.id) == len("verifiers-") + 16 for task in splits["eval"])


def test_tasks_with_other_rewards_have_other_ids() -> None:
    plugged = {"task": {"rewards": {"correct": {"weight": 5.0}}}}
    assert {t.id for t in sums().tasks("eval", 9)}.isdisjoint(t.id for t in sums(args=plugged).tasks("eval", 9))


def test_with_eval_args_all_other_tasks_are_for_training() -> None:
    source = sums(args={"count": 40}, eval_args={"first": 100, "count": 9})
    train, warm = source.tasks("train", 14), source.tasks("warm_start", 3)
    assert {answer_of(task) for task in source.tasks("eval", 9)} == {str(number) for number in range(101, 110)}
    assert all(int(answer_of(task)) <= 40 for task in (*train, *warm))
    assert not {task.id for task in train} & {task.id for task in warm}
    with pytest.raises(UserError, match="9 different problems for 'eval', of 10"):
        source.tasks("eval", 10)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"id": "no-such-package"}, "environment.options.id = 'no-such-package': "),
        ({"id": SUMS, "args": {"cuont": 3}}, "environment.options.args.cuont: "),
        ({"id": SUMS, "eval_args": {"count": "many"}}, "environment.options.args.count: "),
        ({"id": SUMS, "env": {"agent": {"max_turn": 3}}}, "environment.options.env.agent.max_turn: "),
        ({"id": str(HERE / "test_verifiers.py")}, "defines no `__all__`"),
        ({"id": "nobody.py"}, "no file"),
        ({"id": SUMS, "arguments": {}}, "environment.options.arguments: "),
    ],
)
def test_the_error_for_a_wrong_option_names_the_option(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        taskset(options)


# --- episodes -------------------------------------------------------------------------------------------
def test_the_score_is_the_weighted_sum_of_rewards_and_has_each_as_a_part() -> None:
    source = sums()
    task = source.tasks("train", 1)[0]
    opening, end = play_episode(source, task, answer_of(task))
    question = task.payload["data"]["prompt"]
    assert opening.messages == ({"role": "system", "content": PROMPT}, {"role": "user", "content": question})
    assert end.done
    assert end.score is not None
    assert end.score.value == 2.0 * 1.0 + 0.5 * 1.0
    assert end.score.parts == {"correct": 1.0, "short_text": 1.0, "turns": 1.0}
    (_, wrong) = play_episode(source, task, "I would not know")
    assert wrong.score is not None
    assert wrong.score.value == 0.0


def test_text_in_think_tags_is_not_part_of_the_answer() -> None:
    source = sums()
    task = source.tasks("train", 1)[0]
    for thought in ("<think>carry nothing</think>\n\n", "so it is</think>"):
        (_, end) = play_episode(source, task, thought + answer_of(task))
        assert end.score is not None
        assert end.score.parts["correct"] == 1.0
    (_, cut) = play_episode(source, task, "<think>" + answer_of(task))
    assert cut.score is not None
    # The thought was not closed, so that the reply is empty, which is short but not correct.
    assert (cut.score.parts["correct"], cut.score.parts["short_text"]) == (0.0, 1.0)


def test_an_episode_has_turns_until_the_environment_ends_it() -> None:
    source = sums(args={"guesses": 3})
    task = source.tasks("train", 1)[0]
    _, first, second, end = play_episode(source, task, "no", "no", "no")
    assert first.messages == ({"role": "user", "content": "No. 2 left."},)
    assert second.messages == ({"role": "user", "content": "No. 1 left."},)
    assert end.done
    assert end.score is not None
    assert end.score.parts["turns"] == 3.0
    (*_, solved) = play_episode(source, task, "no", answer_of(task))
    assert solved.score is not None
    assert solved.score.value == 2.5


def test_a_stop_condition_of_the_task_ends_the_episode_with_a_score() -> None:
    source = sums(args={"guesses": 3})
    (_, _, end) = play_episode(source, source.tasks("train", 1)[0], "no", "stop")
    assert end.done
    assert end.score is not None
    assert end.score.valid
    assert end.info["stop_condition"] == "gave_up"


def test_max_turns_of_an_agent_ends_the_episode_with_a_score() -> None:
    source = sums(args={"guesses": 9}, env={"agent": {"max_turns": 2}})
    (_, _, end) = play_episode(source, source.tasks("train", 1)[0], "no", "no")
    assert end.done
    assert end.score is not None
    assert end.score.parts["turns"] == 2.0
    assert end.info["stop_condition"] == "max_turns"


def test_an_error_in_the_environment_raises_with_its_message() -> None:
    source = sums(args={"guesses": 3})
    with pytest.raises(RuntimeError, match="ValueError: the engine broke"):
        play_episode(source, source.tasks("train", 1)[0], "crash")


def test_a_judge_of_verifiers_calls_its_own_endpoint(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def judged() -> Observation:
        async with serving(lambda body: asked.append(body) or "yes") as url:
            judge = {"id": "reference", "name": "judge", "weight": 3.0, "model": "grader", "base_url": url}
            source = sums(args={"task": {"judges": [{**judge, "api_key_var": "NO_KEY"}]}})
            environment = source.environment(source.tasks("train", 1)[0])
            await environment.reset()
            return await environment.step(said("about two"))

    end = asyncio.run(judged())
    assert asked[0]["model"] == "grader"
    assert "about two" in json.dumps(asked[0]["messages"])
    assert end.score is not None
    assert end.score.parts["judge"] == 1.0
    assert end.score.value == 3.0


# --- through the loop -----------------------------------------------------------------------------------
def words(*texts: str) -> Renderer:
    return Renderer(build_tokenizer([PROMPT, "No. 1 2 left. + = ?", *texts], 256))


def trajectory(source: Taskset, task: Task, answers: Sequence[str], *, workers: int = 0, **context: Any) -> Any:
    """Play one episode with a scripted sampler. Returns the trajectory and the sampler, which records its calls."""
    renderer, turn = words(*answers), iter(range(100))
    sampler = ScriptedSampler(lambda *_: renderer.spoken(answers[next(turn)]).tolist())

    async def play() -> Any:
        async with EnvironmentPool(source, workers=workers) as pool:
            settings = ContextSettings(max_tokens_per_turn=32, **context)
            player = Player(pool.environment, sampler, renderer, settings, 1.0, max_context=4096)
            return await player.play(task, trajectory_id="t", seed=0)

    return asyncio.run(play()), sampler


def test_the_trajectory_has_exactly_the_sampled_tokens() -> None:
    source = sums(args={"guesses": 3})
    task = source.tasks("train", 1)[0]
    answers = ["no", "<think>odd  spaces\n</think> still no", answer_of(task)]
    result, sampler = trajectory(source, task, answers)
    assert result.stop is StopReason.DONE
    assert result.score.value == 2.5
    (segment,) = result.segments
    tokens = np.concatenate([turn.tokens for turn in segment])
    # Each prompt consists of all earlier tokens of the trajectory, including the sampled ones.
    for prompt, _, _ in sampler.calls:
        assert prompt.tolist() == tokens[: prompt.size].tolist()
    renderer = words(*answers)
    sampled = [turn.tokens.tolist() for turn in segment if turn.sampled]
    assert sampled == [renderer.spoken(answer).tolist() for answer in answers]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_reaches_max_turns_is_scored(workers: int) -> None:
    source = sums(args={"guesses": 9})
    result, _ = trajectory(source, source.tasks("train", 1)[0], ["no", "no"], workers=workers, max_turns=2)
    assert result.stop is StopReason.MAX_TURNS
    assert result.score.valid
    assert result.score.value == 0.5
    assert result.score.parts["turns"] == 2.0


def test_limits_of_tokens_hold_for_calls_and_for_seats() -> None:
    for agent, turns, sampled in (({"sampling": {"max_tokens": 1}}, 3, 3), ({"max_output_tokens": 3}, 2, 4)):
        source = sums(args={"guesses": 3}, env={"agent": agent})
        result, _ = trajectory(source, source.tasks("train", 1)[0], ["no", "no", "no"])
        assert result.stop is StopReason.DONE
        assert result.score.valid
        assert (result.info["turns"], result.sampled_tokens) == (turns, sampled)


def test_more_than_a_hundred_concurrent_episodes_do_not_affect_each_other() -> None:
    source = sums(args={"guesses": 4})
    # An HTTP client has 100 connections by default.
    tasks = source.tasks("train", 110)
    # All episodes are started before any continues, as if their completions were sampled in one batch.
    everybody = asyncio.Barrier(len(tasks))

    async def episode(task: Task, tries: int) -> float:
        environment = source.environment(task)
        observation = await environment.reset()
        await everybody.wait()
        for _ in range(tries):
            observation = await environment.step(said("no"))
        if not observation.done:
            observation = await environment.step(said(answer_of(task)))
        await environment.close()
        assert observation.score is not None
        return observation.score.value

    async def together() -> list[float]:
        episodes = asyncio.gather(*(episode(task, i % 4) for i, task in enumerate(tasks)))
        return await asyncio.wait_for(episodes, 100)

    assert asyncio.run(together()) == [2.5] * len(tasks)


def test_closing_an_unfinished_episode_removes_it_from_the_host() -> None:
    from gleanrl.environments.adapters.verifiers_serving import Host

    source = sums(args={"guesses": 3})

    async def abandon() -> None:
        environment = source.environment(source.tasks("train", 1)[0])
        await environment.reset()
        (host,) = Host._all.values()
        assert len(host.episodes) == 1
        await environment.close()
        assert not host.episodes
        assert await environment.conclude(StopReason.MAX_TURNS) is None

    asyncio.run(abandon())
    assert not Host._all


# --- tools ----------------------------------------------------------------------------------------------
@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Taskset]:
    """Return a function that loads `verifiers_facts` as an importable package, as its tool servers also import it."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    return lambda **args: taskset({"id": "verifiers-facts", "args": args})


def asks(tool: str, arguments: Any, number: int = 0) -> Message:
    return said("", tool_calls=[call_message(Call(tool, arguments), number)])


def test_tools_are_declared_and_calls_get_results_or_errors(facts: Callable[..., Taskset]) -> None:
    source = facts()
    task = source.tasks("train", 1)[0]
    stone = task.payload["data"]["prompt"].removeprefix("What is known of ").removesuffix("?")
    opening, known, wrong, unknown, end = play_episode(
        source,
        task,
        asks("facts_lookup", {"name": stone}),
        asks("facts_lookup", '{"name": ', 1),  # a call whose arguments are not valid JSON
        asks("facts_find", {"name": stone}, 2),
        answer_of(task),
    )
    (tool,) = opening.tools
    assert tool["function"]["name"] == "facts_lookup"
    assert tool["function"]["description"] == "What is known of a stone."
    assert list(tool["function"]["parameters"]["properties"]) == ["name"]
    shown = "secret" if answer_of(task) == "fact 0" else answer_of(task)
    assert known.messages == ({"role": "tool", "tool_call_id": "call00000", "name": "facts_lookup", "content": shown},)
    assert "not valid JSON" in wrong.messages[0]["content"]
    assert "no tool 'facts_find'; there are facts_lookup" in unknown.messages[0]["content"]
    assert end.score is not None
    assert end.score.parts == {"told": 1.0, "calls": 3.0}


def test_a_shared_tool_server_serves_all_episodes_and_intercepts_apply(facts: Callable[..., Taskset]) -> None:
    source = facts(shared=True, task={"own": False})
    tasks = [*source.tasks("train", 12), *source.tasks("warm_start", 4), *source.tasks("eval", 3)]
    numbers = {task.id: task.payload["data"]["prompt"].split()[-1].removesuffix("?") for task in tasks}

    async def episode(task: Task) -> tuple[str, str]:
        environment = source.environment(task)
        await environment.reset()
        observation = await environment.step(asks("shared_lookup", {"name": f"stone {numbers[task.id]}"}))
        await environment.close()
        return numbers[task.id], observation.messages[0]["content"]

    async def together() -> list[tuple[str, str]]:
        return await asyncio.gather(*map(episode, tasks))

    heard = dict(asyncio.run(together()))
    assert heard == {n: "secret" if n == "0" else f"fact {int(n) * 7}" for n in numbers.values()}
    assert "0" in heard


def test_tool_calls_are_rendered_and_parsed_by_the_chat_template(facts: Callable[..., Taskset]) -> None:
    source = facts(shared=True, task={"own": False})
    task = source.tasks("train", 1)[0]
    plain = Renderer(tokenizer("own"))
    answers = iter([asks("shared_lookup", {"name": "stone 3"}), said("fact 21")])
    schemas: list[Any] = []

    class Watched(EnvironmentPool):
        """Records the tools of the episode, because the scripted sampler needs them to render tool calls."""

        def environment(self, task: Task) -> Environment:
            inner = super().environment(task)
            reset = inner.reset

            async def watched() -> Observation:
                observation = await reset()
                schemas.append(observation.tools)
                return observation

            inner.reset = watched
            return inner

    sampler = ScriptedSampler(lambda *_: plain.with_tools(schemas[0]).spoken(next(answers)).tolist())

    async def play() -> Any:
        async with Watched(source) as pool:
            player = Player(pool.environment, sampler, plain, ContextSettings(max_tokens_per_turn=64), 1.0, 4096)
            return await player.play(task, trajectory_id="t", seed=0)

    result = asyncio.run(play())
    assert result.stop is StopReason.DONE
    roles = [message["role"] for message in conversation(result)]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert conversation(result)[2]["content"] == "fact 21"
    assert result.score.parts["calls"] == 1.0


# --- conversations that cannot be ours ------------------------------------------------------------------
def test_a_second_conversation_of_the_policy_is_refused() -> None:
    source = taskset({"id": str(HERE / "verifiers_pair.py")})
    with pytest.raises(RuntimeError, match=r"seat 'second'.*environment\.options\.env\.second\.client"):
        play_episode(source, source.tasks("train", 1)[0], "mine")


def test_an_agent_with_its_own_client_plays_together_with_the_policy() -> None:
    async def match() -> Observation:
        async with serving(lambda body: "theirs") as url:
            seat = {"model": "opponent", "client": {"base_url": url, "api_key_var": "NO_KEY"}}
            source = taskset({"id": str(HERE / "verifiers_pair.py"), "env": {"second": seat}})
            environment = source.environment(source.tasks("train", 1)[0])
            await environment.reset()
            return await environment.step(said("mine"))

    end = asyncio.run(match())
    assert end.score is not None
    assert end.score.parts == {"heard": 1.0}


@pytest.mark.parametrize(
    ("harness", "named"), [("Forgetful", "rewritten"), ("Twice", "adds nothing"), ("Several", "stop = ")]
)
def test_a_harness_that_asks_for_what_the_policy_cannot_do_is_rejected(harness: str, named: str) -> None:
    source = taskset({"id": str(HERE / "verifiers_pair.py"), "args": {"harness": harness}})
    with pytest.raises(RuntimeError, match=named):
        play_episode(source, source.tasks("train", 1)[0], "one", "two")


def test_a_harness_that_streams_responses_works_as_without_streaming() -> None:
    source = taskset({"id": str(HERE / "verifiers_pair.py"), "args": {"harness": "Streaming"}})
    _, more, end = play_episode(source, source.tasks("train", 1)[0], "first", "second")
    assert more.messages == ({"role": "user", "content": "heard first"},)
    assert end.score is not None
    assert end.score.parts == {"heard": 1.0}


# --- helpers --------------------------------------------------------------------------------------------
@asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], str]) -> AsyncIterator[str]:
    """Run an OpenAI-compatible server on 127.0.0.1 that stands for another model. Yields its URL."""
    from aiohttp import web

    async def complete(request: Any) -> Any:
        body = await request.json()
        message = {"role": "assistant", "content": answer(body)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        about = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**about, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
