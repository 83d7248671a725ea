"""Tests of `gleanrl.rewards.judge.Judge` against a real vLLM server. The server runs a tiny model that is fine-tuned
here to write judgements."""

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
START_S = 900  # seconds within which vLLM must start; long, because the machine may be busy
WORDS = {"awful": 0, "poor": 2, "fair": 5, "good": 8, "perfect": 10}
TASK = Task("t", ({"role": "user", "content": "What is 2+2?"},))
SHORT: dict[str, Any] = {"template": "{response}", "max_tokens": 60}
MANY = 64

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3 * START_S)]


def command() -> list[str]:
    """Return the command that starts a vLLM server; the folder of the model must follow as its last argument."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    # `vllm serve` fails in this environment: it reads the version of a package that has another name here
    if python.exists():
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
    """Return different responses, each with its score from 0 to 1."""
    words = list(WORDS)
    return [(f"{words[n % 5]}, {n}", WORDS[words[n % 5]] / 10) for n in numbers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with 0.4 M parameters, fine-tuned to write the judgement of each word in ``WORDS``."""
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
        ready.set()  # the process ended, so it will not become ready


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


# the formats that a user may request from a server, each with its parser
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
def test_concurrent_responses_are_judged_and_their_tokens_counted(server: Server, folder: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    asked = responses(range(1000, 1000 + MANY))  # most are not in the training data
    scores, metrics = judged(server, [text for text, _ in asked], {**KINDS[kind]})
    assert [score.valid for score in scores] == [True] * MANY, scores
    if kind != "choice":  # the model was not trained to write these choices
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


def test_a_refused_request_gives_an_invalid_score_with_the_reason_of_the_server(server: Server) -> None:
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


def test_truncated_structured_output_gives_an_explanation_that_names_max_tokens(server: Server) -> None:
    ((score,), metrics) = judged(server, ["good 1"], {**SHORT, "max_tokens": 3}, backoff_s=0.01)
    assert not score.valid
    assert "raise max_tokens" in (score.explanation or "")
    assert metrics["service/failed/answer"] == 1


def test_a_server_kill_stops_the_run_and_the_next_run_judges_only_the_missing_responses(
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
        else:  # the outage ended the requests under way, and the waiting ones were not sent
            assert isinstance(score, UserError)
            assert "has only failed for" in str(score)
    server.start()
    after, metrics = judged(server, [text for text, _ in asked], {**SHORT}, **settings)
    assert [score.value for score in after] == expected
    assert metrics["service/journal_hits"] == len(judged_before)  # judged (and paid for) once
    assert metrics["service/scored"] == MANY - len(judged_before)
