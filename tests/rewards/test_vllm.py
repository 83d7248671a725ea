"""The judge against a real vLLM server: a tiny model that was taught to judge, saved and served as any other."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import RewardAgent
from gleanrl.rewards.judge import Judge
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

ROOT = Path(__file__).parents[2]
START_S = 900  # for vLLM, on a machine that has other things to do
WORDS = {"awful": 0, "poor": 2, "fair": 5, "good": 8, "perfect": 10}
TASK = Task("t", ({"role": "user", "content": "What is 2+2?"},))
SHORT: dict[str, Any] = {"template": "{response}", "max_tokens": 60}
MANY = 64

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3 * START_S)]


def command() -> list[str]:
    """What serves the model whose folder follows."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if python.exists():  # not its `vllm serve`, which asks for the version of a package that is called otherwise here
        return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    vllm = shutil.which("vllm")
    if vllm is None:
        pytest.skip("there is no vLLM: make vllm")
    return [vllm, "serve"]


def says(word: str) -> str:
    return f'{{"reasoning": "That is {word}.", "score": {WORDS[word]}}}'


def word_of(response: str) -> str:
    return response.partition(",")[0]


def responses(numbers: range) -> list[tuple[str, float]]:
    """Different responses, and what each is worth."""
    words = list(WORDS)
    return [(f"{words[n % 5]}, {n}", WORDS[words[n % 5]] / 10) for n in numbers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.4 M parameters that has learned what to say of each word."""
    from gleanrl.config.settings import ModelSettings
    from gleanrl.learners.supervised import fine_tune
    from gleanrl.learners.tiny import build_model, build_tokenizer
    from gleanrl.rollout.renderer import Renderer
    from gleanrl.types import Message, segment_arrays

    asked = [text for text, _ in responses(range(0, 4400, 11))]
    tokenizer = build_tokenizer([*asked, *map(says, 20 * list(WORDS))], vocabulary=256)
    model = build_model(
        ModelSettings(hidden_size=128, layers=2, heads=4, kv_heads=2, max_context=512), tokenizer, seed=0
    )
    renderer = Renderer(tokenizer)
    shown = [
        (Message(role="user", content=text), Message(role="assistant", content=says(word_of(text)))) for text in asked
    ]
    examples = [segment_arrays(renderer.demonstration(conversation))[:2] for conversation in shown]
    learned = fine_tune(model, examples, steps=120, batch=16, lr=3e-3, seed=0)
    assert learned["loss/last"] < 0.05
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Server:
    """A vLLM server that can be killed and started again at the same address."""

    options = "--served-model-name judge --enforce-eager --dtype float32 --max-model-len 512 --max-num-seqs 64"
    environment: Mapping[str, str] = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def __init__(self, model: Path) -> None:
        self.model = model
        self.log: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(self.environment)
        self.process = subprocess.Popen(
            [*command(), str(self.model), *self.options.split(), *where],
            env=env,
            cwd=self.model,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        assert ready.wait(START_S), "".join(self.log[-50:])
        assert self.process.poll() is None, "".join(self.log[-50:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "Application startup complete" in line:
                ready.set()
        ready.set()  # it ended


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    command()
    server = Server(folder)
    server.start()
    yield server
    server.kill()


def judged(
    server: Server, asked: list[str], judge: dict[str, Any], **settings: Any
) -> tuple[list[Score], dict[str, float]]:
    async def main() -> tuple[list[Score], dict[str, float]]:
        scorer = Judge(server.url, judge.pop("model", "judge"), **judge)
        async with RewardAgent(scorer, **{"max_concurrency": MANY, "timeout_s": 300, **settings}) as agent:
            async for _, scores in agent.score_groups([[(TASK, text) for text in asked]]):
                return scores, dict(agent.metrics())
        raise AssertionError("no group came back")

    return asyncio.run(main())


# what a user may ask of a server, and how its answer is read
KINDS: dict[str, dict[str, Any]] = {
    "schema": {**SHORT},
    "text": {**SHORT, "parse": r'regex:"score": (\d+)'},
    "choice": {
        **SHORT,
        "parse": r"regex:score (\d+)",
        "extra": {"structured_outputs": {"choice": [f"score {score}" for score in range(11)]}},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_at_once_are_judged_and_their_tokens_counted(server: Server, folder: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    asked = responses(range(1000, 1000 + MANY))  # most of which it was never shown
    scores, metrics = judged(server, [text for text, _ in asked], {**KINDS[kind]})
    assert [score.valid for score in scores] == [True] * MANY, scores
    if kind != "choice":  # which it was not taught
        assert [score.value for score in scores] == [worth for _, worth in asked]
        assert [score.explanation for score in scores] == [says(word_of(text)) for text, _ in asked]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[Any] = [[{"role": "user", "content": text}] for text, _ in asked]
    lengths = [
        len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)) for prompt in prompts
    ]
    assert [score.parts["cost/prompt_tokens"] for score in scores] == lengths
    assert all(0 < score.parts["cost/completion_tokens"] <= 60 for score in scores)
    assert metrics["service/prompt_tokens"] == sum(lengths)
    assert metrics["time/reward_in_flight_most"] == MANY


def test_what_the_server_refuses_is_no_score_and_says_why(server: Server) -> None:
    for wrong, text, said in (
        ({"model": "another"}, "good 1", "another"),
        ({}, "good " * 600, "512"),
        ({"extra": {"structured_outputs": {"choice": "no list"}}, "parse": r"regex:(\d+)"}, "good 1", "status 4"),
    ):
        ((score,), metrics) = judged(server, [text], {**SHORT, **wrong})
        assert not score.valid
        assert said in (score.explanation or "")
        assert metrics["service/retries"] == 0  # no further try would help
        assert metrics["service/failed/refused"] == 1


def test_structured_output_that_is_cut_short_says_what_to_do(server: Server) -> None:
    ((score,), metrics) = judged(server, ["good 1"], {**SHORT, "max_tokens": 3}, backoff_s=0.01)
    assert not score.valid
    assert "raise max_tokens" in (score.explanation or "")
    assert metrics["service/failed/answer"] == 1


def test_a_server_killed_in_the_middle_ends_the_run_and_started_again_judges_what_it_had_not(
    server: Server, tmp_path: Path
) -> None:
    asked = responses(range(2000, 2000 + MANY))
    settings: dict[str, Any] = {
        "max_concurrency": 8,
        "attempts": 2,
        "backoff_s": 0.05,
        "max_failed_fraction": 1.0,
        "down_after_s": 3.0,
        "journal": tmp_path / "journal.sqlite",
    }

    async def killed() -> list[Score | BaseException]:
        async with RewardAgent(Judge(server.url, "judge", **SHORT), **settings) as agent:
            waiting = [asyncio.ensure_future(agent.score(TASK, text)) for text, _ in asked]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(server.kill)
            return await asyncio.gather(*waiting, return_exceptions=True)

    before = asyncio.run(killed())
    expected = [worth for _, worth in asked]
    judged_before = [number for number, score in enumerate(before) if isinstance(score, Score) and score.valid]
    assert 0 < len(judged_before) < MANY
    for number, score in enumerate(before):
        if number in judged_before:
            assert isinstance(score, Score)
            assert score.value == expected[number]
        else:  # what was under way ended with the outage, and nothing else was asked for
            assert isinstance(score, UserError)
            assert "has only failed for" in str(score)
    server.start()
    after, metrics = judged(server, [text for text, _ in asked], {**SHORT}, **settings)
    assert [score.value for score in after] == expected
    assert metrics["service/journal_hits"] == len(judged_before)  # judged (and paid for) once
    assert metrics["service/scored"] == MANY - len(judged_before)
