"""Retries and time limits of `gleanrl.utils.retry`.

The retry tests run on a virtual clock, so that waiting takes no time. The `Timeout` tests that block the event loop
run on the real clock.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.simulate import virtual_time
from gleanrl.utils.retry import UNREACHABLE, Fatal, Retries, Retryable, RetryPolicy, Timeout, cause_of, reason_of


def failing(*errors: Exception) -> Callable[[], asyncio.Future[int]]:
    """Return a function that raises one of the errors per call, in order, and then returns the number of calls."""
    left = list(errors)

    async def call() -> int:
        if left:
            raise left.pop(0)
        return len(errors) + 1

    return call  # type: ignore[return-value]


def timed(policy: RetryPolicy, *errors: Exception) -> tuple[int, float]:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        return await policy.run(failing(*errors)), loop.time() - started

    return virtual_time.run(main())


def test_retryable_errors_are_tried_again_and_others_are_not() -> None:
    errors = [Retryable("busy"), TimeoutError(), ConnectionResetError()]
    assert timed(RetryPolicy(attempts=4), *errors)[0] == 4
    for fatal in (Fatal("no"), ValueError("bug")):
        with pytest.raises(type(fatal)):
            timed(RetryPolicy(), fatal)


def test_the_last_error_is_raised_once_all_attempts_are_used() -> None:
    with pytest.raises(Retryable, match="third"):
        timed(RetryPolicy(attempts=3), *(Retryable(text) for text in ("first", "second", "third")))


@given(st.integers(1, 12), st.floats(0.01, 10), st.floats(0.01, 100))
def test_the_total_wait_is_at_most_the_sum_of_the_backoff_limits(
    failures: int, backoff_s: float, most_s: float
) -> None:
    policy = RetryPolicy(attempts=failures + 1, backoff_s=backoff_s, max_backoff_s=most_s)
    made, seconds = timed(policy, *(Retryable("busy") for _ in range(failures)))
    assert made == failures + 1
    assert seconds <= sum(min(backoff_s * 2**n, most_s) for n in range(failures)) * (1 + 1e-9)


def test_a_wait_that_the_service_asks_for_is_kept_or_raises_if_over_the_outage_limit() -> None:
    made, seconds = timed(RetryPolicy(backoff_s=0.01), Retryable("busy", 7.0), Retryable("busy"))
    assert made == 3
    assert 7.0 <= seconds < 7.1
    with pytest.raises(Fatal, match="700"):
        timed(RetryPolicy(outage_s=600.0), Retryable("busy", 700.0))


def time_of_success_after_outage(policy: RetryPolicy, seconds: float, *, outage: bool) -> float:
    """Return the time at which a call succeeds if all attempts of the first ``seconds`` fail."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        retries, started = Retries(policy), loop.time()
        while loop.time() - started < seconds:
            try:
                raise Retryable("refused", cause=UNREACHABLE)
            except Retryable as error:
                await asyncio.sleep(retries.next_wait(error, outage=outage))
        return loop.time() - started

    return virtual_time.run(main())


def test_attempts_in_an_outage_are_repeated_for_outage_s_and_others_up_to_their_number() -> None:
    policy = RetryPolicy(attempts=2, backoff_s=0.5, outage_s=100.0)
    assert 30.0 <= time_of_success_after_outage(policy, 30.0, outage=True) <= 60.0
    with pytest.raises(Retryable):
        time_of_success_after_outage(policy, 1000.0, outage=True)
    with pytest.raises(Retryable):
        time_of_success_after_outage(policy, 30.0, outage=False)


def test_with_attempts_none_retries_are_limited_by_outage_s_only() -> None:
    policy = RetryPolicy(attempts=None, backoff_s=0.1, max_backoff_s=5.0, outage_s=60.0)
    assert timed(policy, *(Retryable("busy") for _ in range(9)))[0] == 10
    with pytest.raises(Retryable):
        timed(policy, *(Retryable("busy") for _ in range(10_000)))


def test_a_retryable_error_keeps_its_fields_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(Retryable("busy", 3.0, cause="server", cost={"cost/prompt_tokens": 2.0})))
    assert (str(error), error.after_s, error.cause, error.cost) == ("busy", 3.0, "server", {"cost/prompt_tokens": 2.0})


def test_reason_of_returns_one_line_and_cause_of_classifies_errors() -> None:
    assert reason_of(ValueError("two\nlines")) == "ValueError: two lines"
    assert [cause_of(e) for e in (TimeoutError(), ConnectionRefusedError(), ConnectionResetError(), KeyError())] == [
        "timeout",
        UNREACHABLE,
        "connection",
        "raised",
    ]


# --- time limits ----------------------------------------------------------------------------------------
def test_data_that_arrives_while_the_event_loop_is_blocked_does_not_time_out() -> None:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with Timeout(0.2):
                # Blocks the event loop for 0.5 s, which is longer than the limit.
                asyncio.get_running_loop().call_later(0.1, time.sleep, 0.5)
                theirs.sendall(b"x")
                await asyncio.sleep(0.15)
                return await reader.read(1)
        finally:
            writer.close()
            theirs.close()

    assert asyncio.run(main()) == b"x"


def test_an_event_loop_that_keeps_blocking_extends_a_timeout_only_so_far() -> None:
    async def stall() -> None:
        loop = asyncio.get_running_loop()
        while True:
            loop.call_soon(time.sleep, 0.07)
            await asyncio.sleep(0)

    async def main() -> float:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await limited()
        return time.monotonic() - started

    async def limited() -> None:
        async with Timeout(0.06):
            await stall()

    assert 0.06 < asyncio.run(main()) < 5


@pytest.mark.parametrize("seconds", [2.0, None])
def test_a_timeout_cancels_its_block_after_the_limit_and_none_means_no_limit(seconds: float | None) -> None:
    async def main() -> float:
        limit = Timeout(seconds)
        try:
            async with limit:
                await asyncio.sleep(5.0)
        except TimeoutError:
            assert limit.expired()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == (seconds or 5.0)
