"""The conversations of an episode in which an agent calls the model itself: their tokens, and the segments to train on.

An agent sends the whole conversation with every call. It may continue an earlier conversation, fork it, shorten it,
start others, and make several calls at once. `Conversations` finds the longest conversation that a call continues and
reuses its tokens, so that what was sampled is never tokenised again. All other messages are rendered by the chat
template. `PolicyModel` answers the calls with a sampler.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from gleanrl.protocols import Completion, SamplingParams, Session, Tools
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused, answer_message, message_key
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import ToolsUnknown, next_call
from gleanrl.types import IntArray, Message, Segment, StopReason, Turn, check_messages
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from collections.abc import Callable

CHARACTERS_PER_TOKEN = 256
"""A prompt with more characters for each token of the context is refused before it is tokenised, which takes about a
second for a megabyte of text."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A model call: what it adds to the conversation that it continues, and the answer once there is one."""

    parent: Exchange | None
    """The exchange whose answer the call continues; None if it starts a conversation."""
    context: list[Turn]
    """The turns between the parent's answer and this answer. The last one ends with the generation prompt."""
    prompt: IntArray
    """All tokens that the model sees, int32[n]. Empty once the call is answered, to save memory."""
    renderer: Renderer
    """The renderer with the tools of the call."""
    prefix: int
    """Number of the conversation with the call's messages, for `Conversations`."""
    key: tuple[str, int]
    """Hash of the prompt, and number of earlier calls with the same prompt. It does not depend on the order in which
    calls that are made at once arrive."""
    calls: int
    """Number of the answer's first tool call, from which its id is made (see `next_call`)."""
    answer: Turn | None = None
    """The sampled turn; None until the call is answered."""
    shown: Message = field(default_factory=lambda: Message(role="assistant", content=""))
    """The answer in the form in which the agent got it."""
    stop: str | None = None
    """The stop text that ended the answer; None if none did."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """`ModelAnswer.id` of the answer."""

    def path(self) -> list[Turn]:
        """Return the turns of the whole conversation, up to the answer."""
        turns: list[Turn] = []
        for exchange in reversed([self, *self.ancestors()]):
            turns += exchange.context
            if exchange.answer is not None:
                turns.append(exchange.answer)
        return turns

    def ancestors(self) -> Iterator[Exchange]:
        """Yield the exchanges that this one continues, the latest first."""
        exchange = self.parent
        while exchange is not None:
            yield exchange
            exchange = exchange.parent


class Conversations:
    """Everything that the policy has read and said in one episode.

    For each model call, call `begin`, sample a completion of the exchange's prompt, and call `end`. Further calls may
    begin in between.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.tools: Tools = ()  # the tools of the first call that has any
        self._renderer = renderer
        # A conversation is identified by a number: that of the conversation without its last message, and the key of
        # this message, map to it. A conversation without messages is identified by its tools.
        self._numbers: dict[tuple[int, str], int] = {}
        # For each conversation that ends with a sampled answer, the exchanges with this answer. There are several if
        # the same text was sampled more than once.
        self._known: dict[int, list[Exchange]] = {}
        self._ended: list[Exchange] = []
        self._prompts: Counter[str] = Counter()  # number of calls with each prompt, by the prompt's hash

    def begin(self, messages: Sequence[Message], tools: Tools = ()) -> Exchange:
        """Find the conversation that ``messages`` continue, and render the messages that are new.

        Raises:
            Refused: the messages cannot be rendered, or the last one is the assistant's.
            ToolsUnknown: the chat template does not support tools.
        """
        try:
            check_messages(messages)
        except (TypeError, ValueError) as error:
            raise Refused(str(error)) from None
        if not messages or messages[-1]["role"] == "assistant":
            raise Refused("the last message must not be the assistant's: the policy samples whole answers")
        renderer = self._renderer.with_tools(tools)
        self.tools = self.tools or tuple(tools)
        numbers = [self._number(-1, json.dumps(list(tools)))]
        for message in messages:
            numbers.append(self._number(numbers[-1], message_key(message)))
        parent, held = None, 0  # the exchange that is continued, and the number of its messages
        for count in range(len(messages) - 1, 0, -1):
            if found := self._known.get(numbers[count]):
                # If the same text was sampled more than once, a thought that was sent back says which answer it is.
                thought = messages[count - 1].get("reasoning_content")
                same = [e for e in found if len(found) > 1 and e.shown.get("reasoning_content") == thought]
                parent, held = (same or found)[0], count
                break
        try:
            if parent is None or parent.answer is None:
                context, before = renderer.start(messages), []
            else:
                closed = parent.answer.tokens.size > 0 and int(parent.answer.tokens[-1]) in renderer.ends
                context, before = renderer.extend(messages[held:], closed=closed, after=messages), parent.path()
        except UserError as error:
            raise Refused(str(error)) from None
        prompt = np.concatenate([turn.tokens for turn in (*before, *context)])
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).hexdigest()
        key = (digest, self._prompts[digest])
        self._prompts[digest] += 1
        return Exchange(parent, context, prompt, renderer, numbers[-1], key, next_call(messages))

    def end(self, exchange: Exchange, completion: Completion, stop: Sequence[str] = ()) -> Message:
        """Add the answer that was sampled for an exchange, and return it in the form in which agents get it.

        If the answer contains a text of ``stop``, it ends there. The tokens after this text are discarded, as if they
        had not been sampled, so that the rest has the distribution of sampling that stops at the text.
        """
        renderer, tokens, logprobs = exchange.renderer, completion.tokens, completion.logprobs
        stop = tuple(filter(None, stop))
        if stop and any(text in renderer.tokenizer.decode(tokens) for text in stop):
            low, high = 1, tokens.size  # binary search for the shortest prefix that contains one of the texts
            while low < high:
                middle = (low + high) // 2
                shown = renderer.tokenizer.decode(tokens[:middle])
                low, high = (low, middle) if any(text in shown for text in stop) else (middle + 1, high)
            tokens, logprobs = tokens[:low], logprobs[:low]
            shown = renderer.tokenizer.decode(tokens)
            exchange.stop = min((text for text in stop if text in shown), key=shown.index)
        message = renderer.parse(tokens, exchange.calls, exchange.path())
        for text in stop:
            message["content"] = message["content"].partition(text)[0]
            if "reasoning_content" in message:
                message["reasoning_content"] = message["reasoning_content"].partition(text)[0]
        exchange.answer = Turn(message, tokens, logprobs, completion.version)
        exchange.shown = answer_message(message)
        self._known.setdefault(self._number(exchange.prefix, message_key(exchange.shown)), []).append(exchange)
        self._ended.append(exchange)
        exchange.prompt = np.empty(0, np.int32)
        return exchange.shown

    def earn(self, reward: float, answer_id: str | None = None) -> None:
        """Add ``reward`` to what an answer has earned.

        Args:
            answer_id: id of the answer (`ModelAnswer.id`); None = the one that was sampled last.

        Raises `ValueError` if there is no such answer, or if the reward is not finite.
        """
        if answer_id is None:
            exchange = self._ended[-1] if self._ended else None
        else:
            exchange = next((one for one in self._ended if one.id == answer_id), None)
        if exchange is None or exchange.answer is None:
            missing = "the model has answered nothing yet" if answer_id is None else f"there is no answer {answer_id!r}"
            raise ValueError(f"no message of the model can have earned the reward: {missing}")
        exchange.answer = exchange.answer.earned(reward)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments to train on. Each sampled answer has its log-probs in exactly one of them.

        One of the exchanges that continue an answer continues the segment of this answer: the one with the smallest
        key. Any other begins a segment of its own, in which all earlier turns are context.
        """
        successors: dict[Exchange, Exchange] = {}
        for exchange in self._ended:
            if (parent := exchange.parent) is not None:
                successors[parent] = min(exchange, successors.get(parent, exchange), key=lambda other: other.key)
        segments: dict[Exchange, list[Turn]] = {}  # exchange -> its segment
        begun: list[list[Turn]] = []
        for exchange in self._ended:  # a parent comes before its children
            parent = exchange.parent
            if parent is not None and successors[parent] is exchange:
                segment = segments[parent]
            else:
                earlier = [] if parent is None else parent.path()
                segment = [Turn(turn.message, turn.tokens) for turn in earlier]
                begun.append(segment)
            if exchange.answer is not None:
                segment += [*exchange.context, exchange.answer]
            segments[exchange] = segment
        return tuple(map(tuple, begun))

    def order(self, segments: Sequence[Segment]) -> list[int]:
        """Return the place in time of each sampled turn of ``segments``, which `segments` has returned."""
        places = {id(exchange.answer): place for place, exchange in enumerate(self._ended)}
        return [places[id(turn)] for segment in segments for turn in segment if turn.sampled]

    def _number(self, before: int, key: str) -> int:
        return self._numbers.setdefault((before, key), len(self._numbers))


class PolicyModel:
    """Answers the model calls of one episode with a sampler, and records them.

    Args:
        session: the session of the sampler.
        seed: seed of the random draws. Those of an answer depend on it and on the prompt, and not on the order in which
            calls arrive.
        temperature: sampling temperature of calls that name none. If it is 0, it is that of all calls.
        max_context: maximum number of tokens of a prompt and its answer together.
        max_tokens: maximum number of tokens of an answer.
        max_turns: maximum number of answers; None = no limit.
    """

    def __init__(
        self,
        renderer: Renderer,
        session: Session,
        *,
        seed: int,
        temperature: float,
        max_context: int,
        max_tokens: int,
        max_turns: int | None = None,
    ) -> None:
        self.conversations = Conversations(renderer)
        self._session, self._seed, self._temperature = session, seed, temperature
        self._max_context, self._max_tokens, self._max_turns = max_context, max_tokens, max_turns
        self.turns = 0
        """Number of calls that were answered or are being answered."""
        self.cut = 0
        """Number of answers that a limit of tokens ended."""
        self.altered: str | None = None
        """How the distribution differed from the policy at the run's temperature (see `Completion.altered`)."""
        self.limit: StopReason | None = None
        """The limit of the run that has ended the episode, so far: that of turns, or that of context if the latest call
        has reached it."""
        self.refusal: Refused | None = None
        """The error of the first call that was refused."""
        self.sampling_s = 0.0
        """Seconds in which at least one call was being answered."""
        self.on_failure: Callable[[Exception], None] | None = None
        """Called with an error that must end the run or the episode: the sampler's, or `ToolsUnknown`."""
        self._running = 0

    async def answer(self, call: ModelCall) -> ModelAnswer:
        """Sample the answer to a call.

        Raises:
            Refused: the call cannot be answered, or a limit of the episode is reached.
        """
        if self.turns == self._max_turns:
            self.limit = StopReason.MAX_TURNS
            raise Refused(f"the episode has had all of its {self.turns} model calls", kind="episode_over")
        size = len(json.dumps(call.tools)) + sum(map(_characters, call.messages))
        too_long = f"the prompt is longer than the model's context of {self._max_context} tokens"
        # A message has at least one token, so that a body of many empty ones is not rendered either.
        if size > CHARACTERS_PER_TOKEN * self._max_context or len(call.messages) > self._max_context:
            self.limit = StopReason.CONTEXT_FULL
            raise Refused(too_long, kind="context_length")
        try:
            exchange = self.conversations.begin(call.messages, call.tools)
        except ToolsUnknown as error:
            raise self._failed(error) from error
        room = self._max_context - exchange.prompt.size
        if room < 1:
            self.limit = StopReason.CONTEXT_FULL
            raise Refused(f"{too_long}: it has {exchange.prompt.size}", kind="context_length")
        temperature = self._temperature
        if temperature and call.temperature is not None and call.temperature != temperature:
            temperature = call.temperature
            self.altered = self.altered or f"temperature={temperature:g}"
        params = SamplingParams(
            min(room, self._max_tokens, call.max_tokens or room),
            exchange.renderer.stop_tokens,
            temperature,
            seed=derive(self._seed, *exchange.key),
        )
        self.turns, self._running, started = self.turns + 1, self._running + 1, perf_counter()
        prompt = exchange.prompt
        try:
            completion = await self._session.sample(prompt, params)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._running -= 1
            if not self._running:
                self.sampling_s += perf_counter() - started
        message = self.conversations.end(exchange, completion, call.stop)
        self.altered = self.altered or completion.altered
        if self.limit is StopReason.CONTEXT_FULL:
            self.limit = None
        assert exchange.answer is not None
        tokens = exchange.answer.tokens.size
        cut = completion.finish == "length" and tokens == completion.tokens.size and exchange.stop is None
        self.cut += cut
        finish = "length" if cut else "tool_calls" if message.get("tool_calls") else "stop"
        return ModelAnswer(message, prompt.size, tokens, finish, exchange.id, exchange.stop)

    def refused(self, error: Refused) -> None:
        """Take the error of a call that the endpoint has refused."""
        self.refusal = self.refusal or error

    def _failed(self, error: Exception) -> Refused:
        if self.on_failure is not None:
            self.on_failure(error)
        return Refused(f"the policy failed: {error}", status=500, kind="server")


def _characters(message: Message) -> int:
    """Return the number of characters of a message that a chat template may render."""
    calls = message.get("tool_calls") or ()
    texts = [message.get("content") or "", message.get("reasoning_content") or ""]
    return sum(map(len, [*texts, *(call["function"]["arguments"] for call in calls)]))
