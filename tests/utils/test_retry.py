"""The retry policy, on a virtual clock."""

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
    """A call that raises these errors in turn and then returns how often it was made."""
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
def test_waits_are_bounded(failures: int, backoff_s: float, most_s: float) -> None:
    policy = RetryPolicy(attempts=failures + 1, backoff_s=backoff_s, max_backoff_s=most_s)
    made, seconds = timed(policy, *(Retryable("busy") for _ in range(failures)))
    assert made == failures + 1
    assert seconds <= sum(min(backoff_s * 2**n, most_s) for n in range(failures)) * (1 + 1e-9)


def test_what_the_service_asks_for_is_honoured() -> None:
    made, seconds = timed(RetryPolicy(backoff_s=0.01), Retryable("busy", 7.0), Retryable("busy"))
    assert made == 3
    assert 7.0 <= seconds < 7.1
    with pytest.raises(Fatal, match="700"):
        timed(RetryPolicy(outage_s=600.0), Retryable("busy", 700.0))


def outage(policy: RetryPolicy, seconds: float, *, answered_before: bool) -> float:
    """When a call succeeds that finds no service before ``seconds`` are over."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        retries, started = Retries(policy), loop.time()
        while loop.time() - started < seconds:
            try:
                raise Retryable("refused", cause=UNREACHABLE)
            except Retryable as error:
                await asyncio.sleep(retries.next_wait(error, answered_before=answered_before))
        return loop.time() - started

    return virtual_time.run(main())


def test_an_outage_is_waited_for_within_its_bound() -> None:
    policy = RetryPolicy(attempts=2, backoff_s=0.5, outage_s=100.0)
    assert 30.0 <= outage(policy, 30.0, answered_before=True) <= 60.0
    with pytest.raises(Retryable):
        outage(policy, 1000.0, answered_before=True)
    with pytest.raises(Retryable):  # no service was there before: a wrong address, say
        outage(policy, 30.0, answered_before=False)


def test_without_a_number_of_attempts_time_is_the_only_bound() -> None:
    policy = RetryPolicy(attempts=None, backoff_s=0.1, max_backoff_s=5.0, outage_s=60.0)
    assert timed(policy, *(Retryable("busy") for _ in range(9)))[0] == 10
    with pytest.raises(Retryable):
        timed(policy, *(Retryable("busy") for _ in range(10_000)))


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(Retryable("busy", 3.0, cause="server", cost={"cost/prompt_tokens": 2.0})))
    assert (str(error), error.after_s, error.cause, error.cost) == ("busy", 3.0, "server", {"cost/prompt_tokens": 2.0})


def test_reasons_are_one_line() -> None:
    assert reason_of(ValueError("two\nlines")) == "ValueError: two lines"
    assert [cause_of(e) for e in (TimeoutError(), ConnectionRefusedError(), ConnectionResetError(), KeyError())] == [
        "timeout",
        UNREACHABLE,
        "connection",
        "raised",
    ]


# --- time limits ----------------------------------------------------------------------------------------
def test_an_answer_that_arrives_while_the_loop_stands_still_is_in_time() -> None:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with Timeout(0.2):
                asyncio.get_running_loop().call_later(0.1, time.sleep, 0.5)  # the loop does nothing else
                theirs.sendall(b"x")
                await asyncio.sleep(0.15)
                return await reader.read(1)
        finally:
            writer.close()
            theirs.close()

    assert asyncio.run(main()) == b"x"


def test_a_loop_that_only_stands_still_does_not_extend_a_limit_for_ever() -> None:
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
def test_a_limit_ends_what_takes_longer(seconds: float | None) -> None:
    async def main() -> float:
        limit = Timeout(seconds)
        try:
            async with limit:
                await asyncio.sleep(5.0)
        except TimeoutError:
            assert limit.expired()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == (seconds or 5.0)
