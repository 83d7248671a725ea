"""`TransformersSampler`: sampling distribution, determinism, admission, publication, cancellation and failure.

The tests run many sessions concurrently on a tiny model. `slowed` makes decoding slow enough to act during a burst.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from gleanrl.protocols import SamplingParams
from gleanrl.samplers import sessions
from gleanrl.samplers.transformers import draw
from gleanrl.schedule.device_lock import SAMPLE_FIRST, TRAIN_FIRST, DeviceLock
from gleanrl.utils.weights import GatheredWeights, layout_of
from tests.samplers.conversations import (
    CONTEXT,
    STOP,
    VOCABULARY,
    assert_exact,
    converse,
    flatten,
    make_model,
    make_sampler,
)

PROMPT = np.array([5, 6, 7], np.int32)
ONE = SamplingParams(1, (STOP,))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return make_model()


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def slowed(sampler):
    """Make every decoding step take at least 3 ms, so that a test can act during a burst on any machine."""
    engine = sampler.decoder.engine
    works = engine.logits

    def logits(feed, store):
        time.sleep(0.003)
        return works(feed, store)

    engine.logits = logits
    return sampler


async def first_token_sampled(sampler) -> None:
    while not sampler.stats()["sampled_tokens"]:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# --- drawing --------------------------------------------------------------------------------------
def test_draws_follow_the_distribution_at_every_temperature() -> None:
    random = np.random.default_rng(0)
    logits = torch.tensor(random.normal(size=12) * 2, dtype=torch.float32)
    logits[3] = -torch.inf
    count = 40_000
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = draw(
            logits.repeat(count, 1), torch.full((count,), temperature), torch.tensor(random.random(count))
        )
        expected = (logits / temperature).softmax(-1)
        torch.testing.assert_close(logprobs.exp(), expected[tokens])
        observed = np.bincount(tokens.numpy(), minlength=12)
        assert observed[3] == 0
        kept = expected.numpy() * count > 5
        chi_square = (((observed - expected.numpy() * count) ** 2) / np.maximum(expected.numpy() * count, 1e-9))[kept]
        # A chi-square value with 11 degrees of freedom is above 31.3 with a probability of 0.1 %.
        assert chi_square.sum() < 31.3


def test_the_largest_random_number_never_draws_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [-torch.inf, 3.0, -torch.inf]])
    for uniform in (0.0, 1.0 - 2.0**-53):
        tokens, logprobs = draw(logits, torch.ones(2), torch.full((2,), uniform, dtype=torch.float64))
        assert tokens[1] == 1
        assert tokens[0] == (1 if uniform else 0)
        assert torch.isfinite(logprobs).all()


def test_first_tokens_of_many_sessions_follow_the_models_distribution(model) -> None:
    async def test():
        sampler = make_sampler(model, max_rows=500)

        async def first(seed: int) -> int:
            async with sampler.session(seed) as session:
                return int((await session.sample(PROMPT, ONE)).tokens[0])

        tokens = await asyncio.gather(*map(first, range(4000)))
        with torch.inference_mode():
            expected = model(torch.tensor(PROMPT).long()[None]).logits[0, -1].softmax(-1).numpy() * len(tokens)
        observed = np.bincount(tokens, minlength=VOCABULARY)
        large = expected >= 5
        statistic = ((observed - expected)[large] ** 2 / expected[large]).sum()
        freedom = large.sum()
        assert statistic < freedom + 4 * np.sqrt(2 * freedom)
        await sampler.close()

    run(test())


# --- determinism ----------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [3, 64])
def test_tokens_and_log_probs_are_bitwise_equal_whatever_the_timing_of_requests(model, rows: int) -> None:
    async def once(delay: float):
        sampler = make_sampler(model, max_rows=rows, prefill_tokens=32)
        return flatten(await asyncio.gather(*(converse(sampler, seed, delay=delay) for seed in range(10))))

    first = asyncio.run(once(0.0))
    assert all(asyncio.run(once(delay)) == first for delay in (0.001, 0.004, 0.004, 0.01))


def test_a_deterministic_burst_waits_for_every_open_session(model) -> None:
    async def test():
        sampler = make_sampler(model, deterministic=True)
        async with sampler.session(1) as one:
            early = asyncio.create_task(one.sample(PROMPT, ONE))
            async with sampler.session(2):
                await asyncio.sleep(0.05)
                assert not early.done()
            # The other session has closed without a request, so that the burst can start.
            await early

    run(test())


def test_a_nondeterministic_burst_does_not_wait_for_open_sessions(model) -> None:
    async def test():
        sampler = make_sampler(model, deterministic=False)
        async with sampler.session(1) as one, sampler.session(2):
            await one.sample(PROMPT, ONE)

    run(test())


def test_a_new_request_is_answered_while_a_long_completion_is_decoded(model) -> None:
    no_stop = SamplingParams(140, ())

    async def test():
        sampler = slowed(make_sampler(model, deterministic=False))
        async with sampler.session(1) as one, sampler.session(2) as two:
            long = asyncio.create_task(one.sample(PROMPT, no_stop))
            await first_token_sampled(sampler)
            await two.sample(PROMPT, ONE)
            assert not long.done()
            assert_exact(model, [[(PROMPT, no_stop, await long)]])

    run(test())


# --- admission ------------------------------------------------------------------------------------
def test_sessions_beyond_max_rows_open_in_order_of_arrival(model) -> None:
    async def test():
        sampler, order = make_sampler(model, max_rows=2), []

        async def episode(seed: int):
            async with sampler.session(seed) as session:
                order.append(seed)
                await session.sample(PROMPT, ONE)

        impatient = asyncio.create_task(episode(99))
        await asyncio.gather(*map(episode, range(7)), asyncio.sleep(0))
        await impatient
        assert order == [99, *range(7)]

    run(test())


def test_a_session_gives_up_rows_that_no_call_uses_if_another_waits_to_open(model) -> None:
    async def test():
        sampler = make_sampler(model, max_rows=3, deterministic=False)
        async with sampler.session(0) as one:
            await asyncio.gather(*(one.sample(PROMPT + i, ONE) for i in range(3)))
            async with sampler.session(1) as two, sampler.session(2) as three:
                records = [[(PROMPT, ONE, await each.sample(PROMPT, ONE))] for each in (one, two, three)]
        assert_exact(model, records)

    run(test())


def test_two_conversations_in_turn_keep_what_each_has_cached(model) -> None:
    async def prefilled(rows: int):
        sampler = make_sampler(model, max_rows=rows, deterministic=False)
        prompts, records = [PROMPT, PROMPT[::-1].copy()], []
        async with sampler.session(0) as session:
            for _ in range(4):
                for number, prompt in enumerate(prompts):
                    said = await session.sample(prompt, SamplingParams(4, ()))
                    records.append([(prompt, SamplingParams(4, ()), said)])
                    prompts[number] = np.concatenate([prompt, said.tokens])
        assert_exact(model, records)
        return sampler.stats()["prefill_tokens"], sum(prompt.size for prompt in prompts)

    tokens, length = asyncio.run(prefilled(2))
    assert tokens <= length
    assert asyncio.run(prefilled(1))[0] > length


def test_sampling_ends_at_a_stop_token_or_the_context_limit_and_empty_prompts_raise(model) -> None:
    async def test():
        sampler = make_sampler(model)
        async with sampler.session(0) as session:
            everything = tuple(range(VOCABULARY))
            stopped = await session.sample(PROMPT, SamplingParams(5, everything))
            assert (stopped.tokens.size, stopped.finish) == (1, "stop")
            long = np.full(CONTEXT - 3, 5, np.int32)
            full = await session.sample(long, SamplingParams(50, ()))
            assert (full.tokens.size, full.finish) == (3, "length")
            assert_exact(model, [[(long, SamplingParams(50, ()), full)]])
            for prompt in (np.full(CONTEXT, 5, np.int32), PROMPT[:0]):
                with pytest.raises(ValueError, match="leaves nothing to sample"):
                    await session.sample(prompt, ONE)
        with pytest.raises(RuntimeError, match="session has closed"):
            await session.sample(PROMPT, ONE)

    run(test())


# --- publication ----------------------------------------------------------------------------------
def test_publish_waits_for_open_sessions_and_new_sessions_wait_for_it(model) -> None:
    other = make_model(seed=1)

    async def test():
        sampler, opened = make_sampler(model), []

        async def late():
            async with sampler.session(9) as session:
                opened.append(sampler.version)
                return [(PROMPT, ONE, await session.sample(PROMPT, ONE))]

        async with sampler.session(0) as session:
            publication = asyncio.create_task(sampler.publish(dict(other.named_parameters()), 7))
            await asyncio.sleep(0.01)
            newcomer = asyncio.create_task(late())
            await asyncio.sleep(0.02)
            assert (sampler.version, publication.done(), opened) == (0, False, [])
            before = await session.sample(PROMPT, ONE)
            assert before.version == 0
            assert_exact(model, [[(PROMPT, ONE, before)]])
        await publication
        record = await newcomer
        assert opened == [7]
        assert record[0][2].version == 7
        assert_exact(other, [record])

    run(test())


def test_in_flight_weights_load_between_bursts_and_completions_have_the_oldest_version(model) -> None:
    other, long = make_model(seed=1), SamplingParams(140, ())

    async def test():
        sampler = slowed(make_sampler(model, inflight=True, deterministic=False))
        async with sampler.session(0) as session:
            answer = asyncio.create_task(session.sample(PROMPT, long))
            await first_token_sampled(sampler)
            await sampler.publish(dict(other.named_parameters()), 3)
            assert sampler.version == 3
            assert not answer.done()
            assert (await answer).version == 0
            assert (await session.sample(PROMPT, ONE)).version == 3
        assert_exact(other, [await converse(sampler, 1)])

    run(test())


def test_weights_that_are_missing_or_misshapen_raise_and_the_old_ones_stay(model) -> None:
    async def test():
        sampler, weights = make_sampler(model), dict(model.named_parameters())
        with pytest.raises(ValueError, match=r"lack 'model.norm.weight'"):
            await sampler.publish({k: v * 0 for k, v in weights.items() if k != "model.norm.weight"}, 1)
        with pytest.raises(ValueError, match=r"has shape \(3,\), not \(32,\)"):
            await sampler.publish({**weights, "model.norm.weight": torch.zeros(3)}, 1)
        assert sampler.version == 0
        assert_exact(model, [await converse(sampler, 1)])

    run(test())


@pytest.mark.parametrize("inflight", [False, True])
def test_no_session_samples_with_partly_loaded_weights(model, inflight: bool) -> None:
    weights = dict(make_model(seed=1).named_parameters())
    *_, last = weights

    async def test():
        sampler = make_sampler(model, inflight=inflight)
        with pytest.raises(NotImplementedError):
            await sampler.publish({**weights, last: weights[last].to("meta")}, 1)
        episode = asyncio.create_task(converse(sampler, 1))
        await asyncio.sleep(0.02)
        assert sampler.stats()["sampled_tokens"] == 0
        await sampler.publish(weights, 1)
        record = await episode
        assert {completion.version for _, _, completion in record} == {1}

    run(test())


# --- cancellation and failure ---------------------------------------------------------------------
def test_a_cancelled_episode_frees_its_row_whenever_it_is_cancelled(model) -> None:
    async def test():
        sampler = make_sampler(model, max_rows=2, deterministic=True)
        random = np.random.default_rng(0)
        for seed in range(30):
            doomed = asyncio.create_task(converse(sampler, seed, turns=20))
            neighbour = asyncio.create_task(converse(sampler, 100 + seed, turns=2))
            waiting = asyncio.create_task(converse(sampler, 200 + seed, turns=2))
            await asyncio.sleep(float(random.random()) * 0.01)
            doomed.cancel()
            if seed % 3 == 0:
                waiting.cancel()
            results = await asyncio.gather(doomed, neighbour, waiting, return_exceptions=True)
            assert_exact(model, [r for r in results if not isinstance(r, BaseException)])
            assert not isinstance(results[1], BaseException)
        await sampler.close()

    run(test())


def test_a_session_still_works_after_one_of_its_requests_was_cancelled(model) -> None:
    async def test():
        sampler = slowed(make_sampler(model, deterministic=False))
        async with sampler.session(0) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.sample(PROMPT, SamplingParams(150, ())), 0.01)
            assert_exact(model, [[(PROMPT, ONE, await session.sample(PROMPT, ONE))]])

    run(test())


def test_an_engine_error_raises_in_all_waiting_requests_and_later_ones_succeed(model) -> None:
    async def test():
        sampler = make_sampler(model)
        engine = sampler.decoder.engine
        works, calls = engine.logits, iter(range(100))

        def broken(feed, store):
            if next(calls) == 6:
                raise MemoryError("no room")
            return works(feed, store)

        engine.logits = broken  # type: ignore[method-assign]
        results = await asyncio.gather(*(converse(sampler, seed) for seed in range(5)), return_exceptions=True)
        assert all(isinstance(r, RuntimeError) and "MemoryError: no room" in str(r) for r in results)
        assert_exact(model, [await converse(sampler, 1)])

    run(test())


def test_closing_the_sampler_raises_in_running_requests_and_waiting_sessions(model) -> None:
    async def test():
        sampler = slowed(make_sampler(model, max_rows=1))
        async with sampler.session(0) as session:
            asking = asyncio.create_task(session.sample(PROMPT, SamplingParams(150, ())))
            queued = asyncio.create_task(converse(sampler, 1))
            await asyncio.sleep(0.01)
            await sampler.close()
            for task in (asking, queued):
                with pytest.raises(RuntimeError, match="has closed"):
                    await task
        await sampler.close()

    run(test())


def test_a_sampler_works_on_a_new_event_loop_after_the_first_one_ended(model) -> None:
    sampler = make_sampler(model)
    expected = flatten([asyncio.run(converse(make_sampler(model), 3))])

    async def abandoned():
        task = asyncio.create_task(converse(sampler, 1, turns=50))
        await asyncio.sleep(0.01)
        # The event loop ends here, while the episode is in the middle of a burst.
        return task

    asyncio.run(abandoned())
    assert flatten([asyncio.run(converse(sampler, 3))]) == expected


# --- device lock and event loop -------------------------------------------------------------------
def test_the_device_lock_is_held_only_during_bursts_and_spans_are_recorded(model) -> None:
    spans: list[tuple[str, float, float]] = []
    holds: list[str] = []
    held = threading.Event()

    class Timeline:
        def record(self, kind: str, start: float, end: float, **tags) -> None:
            assert held.is_set()
            spans.append((kind, start, end))

    @asynccontextmanager
    async def device_lock(work: str):
        holds.append(work)
        held.set()
        yield
        held.clear()

    async def test():
        sampler = make_sampler(model, device_lock=device_lock, timeline=Timeline())
        await asyncio.gather(*(converse(sampler, seed) for seed in range(4)))
        # `close` waits for the end of the last burst.
        await sampler.close()
        assert not held.is_set()
        return sampler.stats()

    stats = asyncio.run(test())
    assert set(holds) == {"sample"}
    assert len(holds) == stats["bursts"]
    assert {kind for kind, _, _ in spans} == {"prefill", "decode"}
    assert sum(end - start for _, start, end in spans) == pytest.approx(stats["prefill_s"] + stats["decode_s"])


@pytest.mark.parametrize(("order", "bursts"), [(SAMPLE_FIRST, 5), (TRAIN_FIRST, 1)])
def test_waiting_training_gets_the_device_lock_between_bursts_only_if_it_has_priority(
    model, monkeypatch, order, bursts: int
) -> None:
    """A completion of 20 tokens takes five bursts of four tokens. Training requests the lock during the first burst."""
    monkeypatch.setattr(sessions, "_STEPS_PER_BURST", 4)

    async def test():
        device_lock = DeviceLock(order=lambda: order)
        sampler = slowed(make_sampler(model, device_lock=device_lock))
        async with sampler.session(1) as session:
            answer = asyncio.create_task(session.sample(PROMPT, SamplingParams(20, ())))
            await first_token_sampled(sampler)
            async with device_lock("train"):
                assert sampler.stats()["bursts"] == bursts
                await asyncio.sleep(0.02)
                assert sampler.stats()["bursts"] == bursts
            assert (await answer).tokens.size == 20
        assert sampler.stats()["bursts"] == 5
        await sampler.close()

    run(test())


def test_a_publication_releases_the_device_while_a_pass_of_the_learner_delays_its_weights(model) -> None:
    """A pass of a sharded learner gives way to a burst, and no weights can be gathered until the pass is over."""

    async def test():
        device_lock = DeviceLock(order=lambda: SAMPLE_FIRST)
        sampler = make_sampler(model, device_lock=device_lock, inflight=True)
        weights, engine = dict(model.named_parameters()), threading.Lock()

        def gather(names):
            with engine:
                return {name: weights[name] for name in names}

        async with sampler.session(1) as session:
            with engine:
                async with device_lock("train") as hold:
                    answer = asyncio.create_task(session.sample(PROMPT, SamplingParams(4, ())))
                    while not hold.wanted:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    publication = asyncio.create_task(sampler.publish(GatheredWeights(layout_of(weights), gather), 1))
                    await asyncio.sleep(0.01)
                    await asyncio.wait_for(hold.give_way(), 5)
            await publication
            assert (await answer).version == 1
        await sampler.close()

    run(test())


def test_the_event_loop_is_not_blocked_during_a_burst(model) -> None:
    async def test():
        sampler, ticks = make_sampler(model), 0
        answer = asyncio.create_task(converse(sampler, 1, turns=20, diverge=0.0))
        while not answer.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 20 * sampler.stats()["bursts"]

    run(test())
