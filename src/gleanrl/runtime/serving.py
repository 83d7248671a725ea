"""Serves a model for clients of OpenAI's and Anthropic's APIs and as a chat page, for `gleanrl serve`."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from gleanrl import samplers
from gleanrl.config.settings import Config
from gleanrl.environments.agent.endpoint import Endpoint
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.rollout.conversations import PolicyModel
from gleanrl.rollout.tool_calls import ToolsUnknown
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import check_model, check_tokenizer, prepare_model
from gleanrl.runtime.run_folder import Checkpoint, RunFolder
from gleanrl.schedule.schedule import Schedule
from gleanrl.utils.errors import UserError
from gleanrl.utils.place import Place
from gleanrl.utils.progress import Progress


def run_serving(
    config: Config, checkpoint: Checkpoint | None, place: Place, console: Progress, ready: Callable[[str], None]
) -> None:
    """Serve a model until SIGINT or SIGTERM arrives.

    The model is the one in ``checkpoint``; if ``checkpoint`` is None, it is ``config.model``. Each call is answered
    from the messages in it alone, which the chat template renders, as inference servers do. Nothing is kept between
    calls, so an earlier answer is tokenised again, whereas an episode continues with the tokens that were sampled. A
    call that gives no temperature has ``sampler.temperature``, and one that gives no limit of tokens has
    ``context.max_tokens_per_turn``. Random draws differ between calls.

    Args:
        ready: called with the server's URL once it accepts requests.

    Raises:
        UserError: the model cannot be loaded, or the address cannot be bound.
    """
    samplers.check(config.sampler)
    set_up_libraries(config)
    with place.bind() as listening:  # before the model is loaded, which may take long
        check_model(config, console, trains=False)
        builder = Builder(
            config, RunFolder(config.path), prepare_model(config, console, restored=checkpoint is not None), console
        )
        if checkpoint is not None:
            check_tokenizer(checkpoint.run, config, builder.prepared.tokenizer)
        renderer = builder.renderer()

        async def serve() -> None:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            async with AsyncExitStack() as stack:
                sampler = builder.evaluation_sampler(Schedule.from_settings(config.schedule), None, None)
                stack.push_async_callback(sampler.close)
                if checkpoint is not None:
                    learner = builder.learner(None, None, trains=False)
                    learner.load(checkpoint.path)
                    await sampler.publish(learner.weights(), checkpoint.step)

                async def answer(call: ModelCall) -> ModelAnswer:
                    seed = secrets.randbits(32)
                    try:
                        renderer.with_tools(call.tools)  # raises an error that is the client's and not the server's
                        async with sampler.session(seed) as session:
                            policy = PolicyModel(
                                renderer,
                                session,
                                seed=seed,
                                temperature=config.sampler.temperature
                                if call.temperature is None
                                else call.temperature,
                                max_context=builder.max_context,
                                max_tokens=call.max_tokens or config.context.max_tokens_per_turn,
                            )
                            return await policy.answer(call)
                    except ToolsUnknown as error:
                        raise Refused(str(error)) from None
                    except UserError as error:  # the server of the sampler `openai` cannot be reached
                        raise Refused(str(error), status=500, kind="server") from None

                page = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")
                endpoint = Endpoint(listening, page)
                stack.push_async_callback(endpoint.close)
                key = "" if place.token is None else place.token.reveal()
                address = await stack.enter_async_context(endpoint.open(answer, key, max_context=builder.max_context))
                ready(address.url)
                await stop.wait()

        asyncio.run(serve())
