"""`ScriptedSampler` follows the contract of the real samplers, because other tests use it in their place."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from gleanrl.protocols import SamplingParams
from gleanrl.samplers.scripted import ScriptedSampler

PROMPT = np.array([4, 5], np.int32)


def test_completions_are_the_scripts_tokens_cut_at_a_stop_token_or_max_tokens() -> None:
    async def test():
        sampler = ScriptedSampler(lambda prompt, seed: [*prompt.tolist(), 1, 9], logprob=-0.25)
        async with sampler.session(0) as session:
            whole = await session.sample(PROMPT, SamplingParams(8, (1,)))
            assert whole.tokens.tolist() == [4, 5, 1]
            assert whole.logprobs.tolist() == [-0.25] * 3
            assert (whole.finish, whole.version) == ("stop", 0)
            cut = await session.sample(PROMPT, SamplingParams(2, (1,)))
            assert (cut.tokens.tolist(), cut.finish) == ([4, 5], "length")
        assert [prompt.tolist() for prompt, _, _ in sampler.calls] == [[4, 5], [4, 5]]

    asyncio.run(test())


def test_seeds_differ_by_session_and_turn_and_are_the_same_in_every_run() -> None:
    async def once() -> list[int]:
        seen: list[int] = []
        sampler = ScriptedSampler(lambda prompt, seed: seen.append(seed) or [1])
        for seed in (0, 1):
            async with sampler.session(seed) as session:
                for _ in range(2):
                    await session.sample(PROMPT, SamplingParams(1, (1,)))
        return seen

    seeds = asyncio.run(once())
    assert len(set(seeds)) == 4
    assert asyncio.run(once()) == seeds


@pytest.mark.parametrize("inflight", [False, True])
def test_publish_waits_for_open_sessions_unless_in_flight(inflight: bool) -> None:
    async def test():
        sampler = ScriptedSampler(lambda prompt, seed: [1], inflight=inflight)
        async with sampler.session(0):
            publication = asyncio.create_task(sampler.publish({}, 4))
            await asyncio.sleep(0)
            late = asyncio.create_task(asyncio.wait_for(sampler.session(1).__aenter__(), 1))
            await asyncio.sleep(0.01)
            assert publication.done() is inflight
            assert late.done() is inflight
        await publication
        await late
        assert sampler.version == 4

    asyncio.run(test())


def test_a_waiting_session_starts_when_the_publication_is_cancelled() -> None:
    async def test():
        sampler = ScriptedSampler(lambda prompt, seed: [1])

        async def sample() -> int:
            async with sampler.session(1) as session:
                return (await session.sample(PROMPT, SamplingParams(1, (1,)))).version

        async with sampler.session(0):
            publication = asyncio.create_task(sampler.publish({}, 1))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(sample())
            await asyncio.sleep(0)
            publication.cancel()
            assert await asyncio.wait_for(waiting, 10) == 0

    asyncio.run(test())


def test_importing_the_scripted_sampler_does_not_import_torch() -> None:
    check = "import sys, gleanrl.samplers.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
