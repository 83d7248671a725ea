"""A verifiers v1 environment with two agents, and harnesses that do more than append to one conversation."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import anthropic
import httpx
import openai
import verifiers.v1 as vf


class PairConfig(vf.TasksetConfig):
    harness: str = ""


class PairData(vf.TaskData):
    harness: str


class PairTask(vf.Task[PairData]):
    pass


class PairTaskset(vf.Taskset[PairTask, PairConfig]):
    def load(self):
        for number in range(30):
            yield PairTask(PairData(prompt=f"Say something, {number}.", harness=self.config.harness), self.config.task)


class Program(vf.Harness[vf.HarnessConfig]):
    """Base class of harnesses that run in this process and send their own requests to the model."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as http:
            answer = await self.ask(http, endpoint, [{"role": "user", "content": data.prompt}])
            await self.go_on(http, endpoint, data.prompt, answer)
        return vf.ProgramResult(0, "", "")

    async def ask(self, http, endpoint, messages, **parameters):
        body = {"model": "policy", "messages": messages, **parameters}
        response = await http.post(f"{endpoint}/chat/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]


class Forgetful(Program):
    async def go_on(self, http, endpoint, prompt, answer):
        summary = [{"role": "user", "content": "So far: something."}, answer, {"role": "user", "content": "More."}]
        await self.ask(http, endpoint, summary)


class Twice(Program):
    async def go_on(self, http, endpoint, prompt, answer):
        await self.ask(http, endpoint, [{"role": "user", "content": prompt}])


class AtOnce(Program):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as http:
            calls = [[{"role": "user", "content": f"{data.prompt} {number}"}] for number in range(2)]
            await asyncio.gather(*(self.ask(http, endpoint, messages) for messages in calls))
        return vf.ProgramResult(0, "", "")


class Several(Program):
    parameters: ClassVar = {"response_format": {"type": "json_object"}}

    async def go_on(self, http, endpoint, prompt, answer):
        more = [{"role": "user", "content": prompt}, answer, {"role": "user", "content": "More."}]
        await self.ask(http, endpoint, more, **self.parameters)


class Stopping(Several):
    parameters: ClassVar = {"stop": ["."]}


class Streaming(Program):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                stream = await client.chat.completions.create(model=ctx.model, messages=messages, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"heard {text}"}]
        return vf.ProgramResult(0, "", "")


class Responses(Program):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        items = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.responses.create(model=ctx.model, input=items)
                items += [item.model_dump(exclude_none=True) for item in answer.output]
                items.append({"role": "user", "content": "More."})
        return vf.ProgramResult(0, "", "")


class Anthropic(Program):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        turns = [{"role": "user", "content": data.prompt}]
        base_url = endpoint.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.messages.create(model=ctx.model, messages=turns, max_tokens=50)
                content = [block.model_dump(exclude_none=True) for block in answer.content]
                turns += [{"role": "assistant", "content": content}, {"role": "user", "content": "More."}]
        return vf.ProgramResult(0, "", "")


class PairEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairEnvConfig]):
    async def run(self, task, agents):
        if task.data.harness:
            agents.first.harness = globals()[task.data.harness](vf.HarnessConfig(id="null"))
            trace = await agents.first.run(task)
            trace.record_reward("heard", float(trace.num_turns == 2))
            return
        mine = await agents.first.run(task)
        theirs = await agents.second.run(task)
        mine.record_reward("heard", float((mine.last_reply, theirs.last_reply) == ("mine", "theirs")))


__all__ = ["PairEnv", "PairTaskset"]
