"""Tests of `gleanrl serve`: the answers to official clients, keys, refusals, the end, and the chat page in Chromium."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gleanrl.environments.agent.endpoint import Endpoint
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from tests.cli.conftest import TIMEOUT, CommandLine, Ended
from tests.tracking.report.browser import BROWSER

aiohttp = pytest.importorskip("aiohttp", reason="the server needs aiohttp")
openai = pytest.importorskip("openai", reason="the official client of OpenAI is missing")

KEY = "a-key-of-the-tests-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@contextmanager
def served(gleanrl: CommandLine, *argv: str) -> Iterator[str]:
    """Yield the URL of `gleanrl serve ...`, which Ctrl-C must end well."""
    job = gleanrl.start("serve", *argv, "--port", "0")
    try:
        end = time.monotonic() + TIMEOUT
        while "serving" not in (said := job.stdout.read_text() if job.stdout.exists() else ""):
            assert "gleanrl: " not in (job.stderr.read_text() if job.stderr.exists() else ""), job.stderr.read_text()
            assert time.monotonic() < end, job.stderr.read_text()
            time.sleep(0.02)
        yield next(word for word in said.split() if word.startswith("http"))
    finally:
        job.kill(signal.SIGINT)
        ended = job.wait()
    assert ended.status == 0, ended.stderr
    assert ended.complaint  # one line, no stack trace


def client(url: str, key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_a_checkpoint_and_an_exported_model_answer_as_transformers_does(gleanrl: CommandLine) -> None:
    assert gleanrl.train("run", "--learner.lr", "3e-2", "--run.steps", "4").status == 0
    exported = gleanrl.folder / "exported"
    assert gleanrl("export", "runs/run/checkpoints/step-2", "--out", str(exported)).status == 0
    questions = ["door 3: say left or go right", "door 5: say left", "left", "go right door 1", "say door"]
    seen = []
    for argv, folder in (
        (("runs/run/checkpoints/step-2",), exported),
        (("run",), gleanrl.run("run").path / "model"),
        (("runs/run/model",), gleanrl.run("run").path / "model"),
        ((str(exported), "--model.max_context", "128"), exported),
    ):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        expected, answers = [], []
        with served(gleanrl, *argv) as url:
            for question in questions:
                messages = [{"role": "user", "content": question}]
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
                tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
                expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
                given = client(url).chat.completions.create(
                    model="policy", messages=messages, temperature=0, max_tokens=6
                )
                assert given.usage.prompt_tokens == prompt["input_ids"].shape[1]
                answers.append(given.choices[0].message.content)
        assert answers == expected
        seen.append(answers)
    assert seen[0] == seen[3] != seen[1] == seen[2]


def test_each_api_answers_and_refuses(whole: tuple[CommandLine, Ended]) -> None:
    gleanrl, _ = whole
    with served(gleanrl, "whole") as url:
        chat = client(url)
        create = chat.chat.completions.create
        assert create(model="policy", messages=HELLO).usage.completion_tokens <= 6  # context.max_tokens_per_turn
        long = create(model="policy", messages=HELLO, max_tokens=12)
        again = [*HELLO, {"role": "assistant", "content": long.choices[0].message.content}, *HELLO]
        stream = list(create(model="policy", messages=again, stream=True))
        assert [c.finish_reason for chunk in stream for c in chunk.choices if c.finish_reason]
        assert chat.responses.create(model="policy", input="hello").status in ("completed", "incomplete")
        assert create(model="policy", messages=HELLO, tools=TOOLS).usage.prompt_tokens > long.usage.prompt_tokens
        huge = [{"role": "user", "content": "1 0 " * 500}]
        with pytest.raises(openai.BadRequestError) as refused:
            create(model="policy", messages=huge)
        assert refused.value.code == "context_length_exceeded"
        anthropic = pytest.importorskip("anthropic", reason="the official client of Anthropic is missing")
        messages = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0).messages
        assert messages.create(model="policy", messages=HELLO, max_tokens=4).usage.output_tokens <= 4
        with pytest.raises(anthropic.BadRequestError):
            messages.create(model="policy", messages=huge, max_tokens=4)


def test_tools_for_a_template_without_them_are_the_mistake_of_the_client(
    whole: tuple[CommandLine, Ended], tmp_path: Path
) -> None:
    gleanrl, _ = whole
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]")
    with served(gleanrl, "runs/whole/model", "--model.chat_template", str(template)) as url:
        assert client(url).chat.completions.create(model="policy", messages=HELLO).choices
        with pytest.raises(openai.BadRequestError):
            client(url).chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)


def test_a_key_is_asked_for_and_a_foreign_host_name_is_refused(whole: tuple[CommandLine, Ended]) -> None:
    gleanrl, _ = whole

    async def status(url: str, path: str, **headers: str) -> int:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url + path) as response:
            return response.status

    with served(gleanrl, "whole", "--host", "localhost") as url:
        assert asyncio.run(status(url, "/v1/models")) == 200
        assert asyncio.run(status(url, "/v1/models", Host="rebound.example")) == 401
    gleanrl.extra = {"SERVE_KEY": KEY}
    with served(gleanrl, "whole", "--key", "env:SERVE_KEY") as url:
        assert client(url, KEY).chat.completions.create(model="policy", messages=HELLO).choices
        for wrong in ("wrong", "env:SERVE_KEY"):
            with pytest.raises(openai.AuthenticationError):
                client(url, wrong).chat.completions.create(model="policy", messages=HELLO)
        assert asyncio.run(status(url, "/v1/models")) == 401
        assert asyncio.run(status(url, "/")) == 200  # the page asks for the key


def test_ctrl_c_ends_the_server_while_it_answers(whole: tuple[CommandLine, Ended]) -> None:
    gleanrl, _ = whole
    answered = threading.Semaphore(0)

    def ask(url: str) -> None:
        with suppress(openai.APIError):  # the server has ended
            while client(url).chat.completions.create(model="policy", messages=HELLO, max_tokens=100):
                answered.release()

    with served(gleanrl, "whole") as url:
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert answered.acquire(timeout=TIMEOUT)
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_mistakes_are_one_line(whole: tuple[CommandLine, Ended]) -> None:
    gleanrl, _ = whole
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for argv in (
            ("nothing",),
            ("runs/nothing",),
            ("runs/whole/checkpoints/step-1",),
            ("missing.gguf",),
            ("tiny.toml",),
            ("no_such_package:model.gguf",),
            (".",),
            ("whole", "--host", "0.0.0.0"),
            ("whole", "--key", KEY),
            ("whole", "--key", "env:NOT_SET"),
            ("whole", "--learner.nothing", "1"),
            ("whole", "--port", str(taken.getsockname()[1])),
        ):
            ended = gleanrl.here("serve", *argv)
            assert (ended.status, ended.stdout) == (2, ""), argv
            assert ended.complaint


class Tab:
    """A page in headless Chromium, which is driven by the DevTools protocol."""

    def __init__(self, channel: Any) -> None:
        self._channel, self._number = channel, 0

    async def do(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._channel.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._channel.receive_json(timeout=60)
            if message.get("id") == self._number:
                return message["result"]

    async def value(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        answer = await self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        end = time.monotonic() + 60
        while not await self.value(script):
            assert time.monotonic() < end, await self.value("document.body.innerText")
            await asyncio.sleep(0.05)

    async def say(self, text: str) -> None:
        """Type ``text`` into the field of the message, press Enter and wait for the end of the request."""
        await self.value("document.getElementById('text').focus()")
        await self.do("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            await self.do("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
        await self.until("!document.getElementById('send').disabled")

    async def shown(self, kind: str) -> list[str]:
        return await self.value(f"[...document.querySelectorAll('{kind}')].map(node => node.textContent)")


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Tab]:
    if BROWSER is None:
        pytest.skip("no Chromium here: the chat page is not opened in a browser")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    process = await asyncio.create_subprocess_exec(
        BROWSER, *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (port := profile / "DevToolsActivePort").exists() or not port.read_text().count("\n"):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json"
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as response:
                pages = [target for target in await response.json() if target["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"]) as channel:
                tab = Tab(channel)
                await tab.do("Page.navigate", url=url)
                await tab.until("document.readyState === 'complete' && document.getElementById('text') !== null")
                yield tab
    finally:
        process.terminate()
        await process.wait()


def test_the_chat_page_shows_answers_errors_and_new_conversations(tmp_path: Path) -> None:
    calls: list[ModelCall] = []
    attack = "<img src=x onerror='document.title = 1'><script>document.title = 2</script>" + "long" * 100
    answers: list[ModelAnswer | Refused] = [
        ModelAnswer({"role": "assistant", "content": attack, "reasoning_content": f"<b>{attack}</b>"}, 7, 5, "stop"),
        Refused("the <b>prompt</b> is too long", kind="context_length"),
        ModelAnswer({"role": "assistant", "content": "second"}, 9, 2, "length"),
        ModelAnswer({"role": "assistant", "content": "new"}, 3, 1, "stop"),
    ]

    async def answer(call: ModelCall) -> ModelAnswer:
        calls.append(call)
        given = answers.pop(0)
        if isinstance(given, Refused):
            raise given
        return given

    async def talk() -> None:
        page = (resources.files("gleanrl.runtime") / "chat.html").read_text(encoding="utf-8")
        endpoint = Endpoint(page=page)
        async with endpoint.open(answer, KEY) as address, opened(address.url, tmp_path / "profile") as tab:
            metrics = {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True}
            await tab.do("Emulation.setDeviceMetricsOverride", **metrics)
            title = await tab.value("document.title")
            assert "API key" not in await tab.value("document.body.innerText")

            await tab.say("<i>hello</i>")  # refused: the page has no key yet
            assert await tab.shown("article.error")
            assert "API key" in await tab.value("document.querySelector('header').innerText")
            assert not await tab.shown("article.user")
            assert await tab.value("document.getElementById('text').value") == "<i>hello</i>"
            await tab.value(f"document.getElementById('key').value = {json.dumps(KEY)}")
            await tab.value("document.getElementById('system').value = 'be brief'")
            await tab.value("document.getElementById('temperature').value = '0.5'")
            await tab.say("")  # Enter sends the text that is still there
            assert not await tab.shown("article.error")
            assert await tab.shown("article.user") == ["<i>hello</i>"]
            assert await tab.shown("article.assistant .text") == [attack]
            assert await tab.shown("article b, article i, article img, article script") == []
            assert await tab.value("document.title") == title
            assert await tab.value("document.documentElement.scrollWidth") <= 360

            await tab.say("again")
            assert await tab.shown("article.error") == ["the <b>prompt</b> is too long"]
            await tab.say("")
            assert (await tab.shown("article.assistant .text"))[1:] == ["second"]

            await tab.value("document.getElementById('new').click()")
            assert await tab.shown("article") == []
            await tab.say("other")
            assert await tab.shown("article.assistant .text") == ["new"]
        await endpoint.close()

    asyncio.run(talk())
    roles = [[message["role"] for message in call.messages] for call in calls]
    talked = ["system", "user", "assistant", "user"]
    assert roles == [["system", "user"], talked, talked, ["system", "user"]]
    assert calls[2].messages[2]["content"] == attack
    assert {call.temperature for call in calls} == {0.5}
