"""The adapter of verifiers: tasks, episodes, rewards, tools and harnesses. Needs the package (make verifiers).

verifiers runs its own rollouts and scoring; the adapter supplies the model's messages.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import ContextSettings, EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Session, Taskset
from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import Message, StopReason, Task, Trajectory
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


def play(
    source: Taskset,
    task: Task,
    *answers: str | Message,
    workers: int = 0,
    max_context: int = 4096,
    renderer: Renderer | None = None,
    **context: Any,
) -> tuple[Trajectory, ScriptedSampler]:
    """Play an episode in which the policy says ``answers``. The sampler that is returned has recorded its calls."""
    renderer, turn = renderer or words(*(answer for answer in answers if isinstance(answer, str))), iter(answers)
    sampler = ScriptedSampler(lambda *_: renderer.spoken(next(turn)).tolist())

    async def talk() -> Trajectory:
        async with EnvironmentPool(source, workers=workers) as pool:
            settings = ContextSettings(**{"max_tokens_per_turn": 64, "max_turns": 20, **context})
            player = Player(
                pool.environment, sampler, renderer, settings, 1.0, max_context, endpoint=pool.endpoint.open
            )
            return await player.play(task, trajectory_id="t", seed=0)

    return asyncio.run(talk()), sampler


def words(*texts: str) -> Renderer:
    return Renderer(build_tokenizer([PROMPT, "No. 1 2 left. + = ?", *texts], 256))


def sampled(result: Trajectory) -> list[list[str]]:
    """Return the contents of the sampled messages of each segment."""
    return [[turn.message["content"] for turn in segment if turn.sampled] for segment in result.segments]


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


def test_a_finite_taskset_is_searched_to_its_end() -> None:
    repeated = sums(args={"repeats": 2_000})  # a taskset without end would be given up long before
    assert {answer_of(task) for task in repeated.tasks("eval", 9)} == {answer_of(t) for t in sums().tasks("eval", 9)}


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
    right, _ = play(source, task, answer_of(task))
    question = task.payload["data"]["prompt"]
    assert conversation(right)[:2] == [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": question},
    ]
    assert right.stop is StopReason.DONE
    assert right.score.value == 2.0 * 1.0 + 0.5 * 1.0
    assert right.score.parts == {"correct": 1.0, "short_text": 1.0, "turns": 1.0}
    wrong, _ = play(source, task, "I would not know")
    assert wrong.score.value == 0.0


def test_text_in_think_tags_is_not_part_of_the_answer() -> None:
    source = sums()
    task = source.tasks("train", 1)[0]
    for thought in ("<think>carry nothing</think>\n\n", "so it is</think>"):
        result, _ = play(source, task, thought + answer_of(task))
        assert result.score.parts["correct"] == 1.0
    cut, _ = play(source, task, "<think>" + answer_of(task))
    # The thought was not closed, so that the reply is empty, which is short but not correct.
    assert (cut.score.parts["correct"], cut.score.parts["short_text"]) == (0.0, 1.0)


def test_an_episode_has_turns_until_the_environment_ends_it() -> None:
    source = sums(args={"guesses": 3})
    task = source.tasks("train", 1)[0]
    result, _ = play(source, task, "no", "no", "no")
    users = [message["content"] for message in conversation(result) if message["role"] == "user"]
    assert users[1:] == ["No. 2 left.", "No. 1 left."]
    assert result.score.parts["turns"] == 3.0
    solved, _ = play(source, task, "no", answer_of(task))
    assert solved.score.value == 2.5


@pytest.mark.parametrize(
    ("options", "answers"),
    [({"args": {"guesses": 3}}, ["no", "stop"]), ({"args": {"guesses": 9}, "env": {"agent": {"max_turns": 2}}}, "ab")],
)
def test_a_stop_condition_or_a_limit_of_verifiers_ends_the_episode_with_a_score(options: Any, answers: Any) -> None:
    source = sums(**options)
    result, _ = play(source, source.tasks("train", 1)[0], *answers)
    assert (result.stop, result.score.value) == (StopReason.DONE, 0.5)
    assert result.score.parts["turns"] == 2.0


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_environment_costs_one_trajectory_and_says_why(workers: int) -> None:
    source = sums(args={"guesses": 3})
    result, _ = play(source, source.tasks("train", 1)[0], "crash", workers=workers)
    assert not result.score.valid
    assert "ValueError: the engine broke" in str(result.score.explanation)


def test_a_judge_of_verifiers_calls_its_own_endpoint() -> None:
    asked: list[dict[str, Any]] = []
    with serving(lambda body: asked.append(body) or "yes") as url:
        judge = {"id": "reference", "name": "judge", "weight": 3.0, "model": "grader", "base_url": url}
        source = sums(args={"task": {"judges": [{**judge, "api_key_var": "NO_KEY"}]}})
        result, _ = play(source, source.tasks("train", 1)[0], "about two")
    assert asked[0]["model"] == "grader"
    assert "about two" in json.dumps(asked[0]["messages"])
    assert (result.score.parts["judge"], result.score.value) == (1.0, 3.0)


def test_the_trajectory_has_exactly_the_sampled_tokens() -> None:
    source = sums(args={"guesses": 3})
    task = source.tasks("train", 1)[0]
    answers = ["no", "<think>odd  spaces\n</think> still no", answer_of(task)]
    result, sampler = play(source, task, *answers)
    assert result.score.value == 2.5
    (segment,) = result.segments
    tokens = np.concatenate([turn.tokens for turn in segment])
    # Each prompt consists of all earlier tokens of the trajectory, including the sampled ones.
    for prompt, _, _ in sampler.calls:
        assert prompt.tolist() == tokens[: prompt.size].tolist()
    renderer = words(*answers)
    spoken = [turn.tokens.tolist() for turn in segment if turn.sampled]
    assert spoken == [renderer.spoken(answer).tolist() for answer in answers]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_reaches_a_limit_of_the_run_is_scored(workers: int) -> None:
    source = sums(args={"guesses": 9})
    task = source.tasks("train", 1)[0]
    result, _ = play(source, task, "no", "no", workers=workers, max_turns=2)
    assert (result.stop, result.score.value) == (StopReason.MAX_TURNS, 0.5)
    assert result.score.parts["turns"] == 2.0
    full, _ = play(source, task, "no", *("never" for _ in range(8)), workers=workers, max_context=60)
    assert (full.stop, full.score.valid) == (StopReason.CONTEXT_FULL, True)
    assert 1.0 < full.score.parts["turns"] < 9.0


def test_limits_of_tokens_hold_for_calls_and_for_seats() -> None:
    for agent, turns, tokens in (({"sampling": {"max_tokens": 1}}, 3, 3), ({"max_output_tokens": 3}, 2, 4)):
        source = sums(args={"guesses": 3}, env={"agent": agent})
        result, _ = play(source, source.tasks("train", 1)[0], "no", "no", "no")
        assert result.stop is StopReason.DONE
        assert result.score.valid
        assert (result.info["turns"], result.sampled_tokens) == (turns, tokens)


def test_more_than_a_hundred_concurrent_episodes_do_not_affect_each_other() -> None:
    source = sums(args={"guesses": 2})
    # An HTTP client has 100 connections by default.
    tasks = source.tasks("train", 110)
    renderer = words("no", *(answer_of(task) for task in tasks))

    def say(prompt: Any, _: int) -> list[int]:
        text = renderer.tokenizer.decode(prompt)
        task = next(task for task in tasks if PROMPT + task.payload["data"]["prompt"] in re.sub(r"<.*?>", "", text))
        return renderer.spoken(answer_of(task) if "No. 1 left." in text else "no").tolist()

    class Together(ScriptedSampler):
        """Answers the first calls of all episodes only when all of them wait, as if it sampled in one batch."""

        @asynccontextmanager
        async def session(self, seed: int) -> AsyncIterator[Session]:
            async with super().session(seed) as inner:

                class Waiting:
                    async def sample(self, prompt: Any, params: Any) -> Any:
                        nonlocal waiting
                        waiting += 1
                        if waiting == len(tasks):
                            everybody.set()
                        await everybody.wait()
                        return await inner.sample(prompt, params)

                yield Waiting()

    waiting = 0
    everybody = asyncio.Event()

    async def together() -> list[Trajectory]:
        async with EnvironmentPool(source) as pool:
            settings = ContextSettings(max_tokens_per_turn=32)
            player = Player(pool.environment, Together(say), renderer, settings, 1.0, 4096, endpoint=pool.endpoint.open)
            episodes = [player.play(task, trajectory_id=task.id, seed=0) for task in tasks]
            return await asyncio.wait_for(asyncio.gather(*episodes), 150)

    assert [result.score.value for result in asyncio.run(together())] == [2.5] * len(tasks)


# --- tools ----------------------------------------------------------------------------------------------
@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Taskset]:
    """Return a function that loads `verifiers_facts` as an importable package, as its tool servers also import it."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    return lambda **args: taskset({"id": "verifiers-facts", "args": args})


def asks(tool: str, arguments: Any, number: int = 0) -> Message:
    return said("", tool_calls=[call_message(Call(tool, arguments), number)])


def toolbox(name: str) -> Renderer:
    """Return a renderer that writes calls of the tool ``name``."""
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    return Renderer(tokenizer("own")).with_tools([schema])


def test_tools_are_declared_and_calls_get_results_or_errors(facts: Callable[..., Taskset]) -> None:
    source = facts()
    task = source.tasks("train", 1)[0]
    stone = task.payload["data"]["prompt"].removeprefix("What is known of ").removesuffix("?")
    result, _ = play(
        source,
        task,
        asks("facts_lookup", {"name": stone}),
        asks("facts_find", {"name": stone}, 2),
        said(answer_of(task)),
        renderer=toolbox("facts_lookup"),
    )
    (tool,) = result.info["tools"]
    assert tool["function"]["name"] == "facts_lookup"
    assert tool["function"]["description"] == "What is known of a stone."
    assert list(tool["function"]["parameters"]["properties"]) == ["name"]
    known, unknown = [message["content"] for message in conversation(result) if message["role"] == "tool"]
    assert known == ("secret" if answer_of(task) == "fact 0" else answer_of(task))
    assert "no tool 'facts_find'; there are facts_lookup" in unknown
    assert result.score.parts == {"told": 1.0, "calls": 2.0}


def test_a_shared_tool_server_serves_all_episodes_and_intercepts_apply(facts: Callable[..., Taskset]) -> None:
    source = facts(shared=True, task={"own": False})
    tasks = [*source.tasks("train", 12), *source.tasks("warm_start", 4), *source.tasks("eval", 3)]
    numbers = {task.id: task.payload["data"]["prompt"].split()[-1].removesuffix("?") for task in tasks}
    renderer = toolbox("shared_lookup")

    def say(prompt: Any, _: int) -> list[int]:
        text = renderer.tokenizer.decode(prompt)
        number = next(number for number in numbers.values() if f"of stone {number}?" in text)
        call = asks("shared_lookup", {"name": f"stone {number}"})
        return renderer.spoken(said("heard") if "fact " in text or "secret" in text else call).tolist()

    async def together() -> list[Trajectory]:
        async with EnvironmentPool(source) as pool:
            player = Player(
                pool.environment,
                ScriptedSampler(say),
                renderer,
                ContextSettings(max_tokens_per_turn=64),
                1.0,
                4096,
                endpoint=pool.endpoint.open,
            )
            return await asyncio.gather(*(player.play(task, trajectory_id=task.id, seed=0) for task in tasks))

    heard = {}
    for result in asyncio.run(together()):
        roles = [message["role"] for message in conversation(result)]
        assert roles == ["user", "assistant", "tool", "assistant"]
        heard[numbers[result.task_id]] = conversation(result)[2]["content"]
    assert heard == {n: "secret" if n == "0" else f"fact {int(n) * 7}" for n in numbers.values()}
    assert "0" in heard


# --- harnesses with several conversations, and with other clients ---------------------------------------
def pair(harness: str = "", **env: Any) -> Taskset:
    return taskset({"id": str(HERE / "verifiers_pair.py"), "args": {"harness": harness}, "env": env})


def test_the_policy_plays_every_seat_that_has_no_client_of_its_own() -> None:
    source = pair()
    result, _ = play(source, source.tasks("train", 1)[0], "mine", "theirs", renderer=words("mine", "theirs"))
    assert sampled(result) == [["mine"], ["theirs"]]
    assert result.score.parts == {"heard": 1.0}


def test_an_agent_with_its_own_client_plays_together_with_the_policy() -> None:
    with serving(lambda body: "theirs") as url:
        source = pair(second={"model": "opponent", "client": {"base_url": url, "api_key_var": "NO_KEY"}})
        result, _ = play(source, source.tasks("train", 1)[0], "mine")
    assert sampled(result) == [["mine"]]
    assert result.score.parts == {"heard": 1.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_harness_may_compact_ask_again_or_ask_twice_at_once(workers: int) -> None:
    """Each answer is trained once, whether it continues a conversation or begins one."""
    for harness in ("Forgetful", "Twice", "AtOnce"):
        source = pair(harness)
        result, _ = play(source, source.tasks("train", 1)[0], "one", "two", workers=workers)
        assert (harness, sorted(sampled(result))) == (harness, [["one"], ["two"]])
        assert result.score.parts == {"heard": 1.0}


@pytest.mark.parametrize("harness", ["Streaming", "Anthropic", "Responses", "Stopping"])
def test_a_harness_may_stream_speak_any_of_the_three_apis_and_name_stop_texts(harness: str) -> None:
    source = pair(harness)
    result, _ = play(source, source.tasks("train", 1)[0], "first", "second. third")
    assert sampled(result) == [["first", "second" if harness == "Stopping" else "second. third"]]
    assert result.score.parts == {"heard": 1.0}


def test_what_the_policy_cannot_do_is_refused_and_the_trajectory_says_so() -> None:
    source = pair("Several")
    result, _ = play(source, source.tasks("train", 1)[0], "first", "second")
    assert not result.score.valid
    assert "response_format" in str(result.score.explanation)


# --- helpers --------------------------------------------------------------------------------------------
@contextmanager
def serving(answer: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Run an OpenAI-compatible server on 127.0.0.1 that stands for another model. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": answer(body)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            about = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({**about, "choices": [choice]}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
