"""Reward models: `RewardModel` runs a sequence-classification model in this process, `PoolingServer` calls vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.http import ServiceScorer, idempotency_key, read_cost, version_of
from gleanrl.rewards.limits import CURRENT_PERMIT, Permit, time_limit
from gleanrl.rewards.request import Request, Scorer, finite
from gleanrl.types import Message, Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient
from gleanrl.utils.retry import Fatal, Retryable
from gleanrl.utils.text import first_line

if TYPE_CHECKING:
    import torch

Activation = Literal["none", "sigmoid"]


@dataclass(slots=True, eq=False)
class _Waiting:
    messages: list[Message]
    permit: Permit
    future: asyncio.Future[float]
    tokens: list[int] = field(default_factory=list)  # token ids of the messages, once encoded


class RewardModel(Scorer):
    """Scores with a Hugging Face sequence-classification model that has one label. The model runs in its own thread.

    Requests are computed in rounds. All requests that arrive during one round form the next round. A round is sorted by
    length and divided into batches, so that little padding is needed. A request that arrives while no round is computed
    starts at once. Training and evaluation have separate rounds, whose batches alternate in proportion to the shares
    of training and evaluation (``eval_share``). The score of a conversation does not depend on the other conversations
    in its batch, except for rounding errors. The time limit (``timeout_s``) is that of one batch, so requests may wait
    for others as long as it takes.

    Args:
        model: a directory or an id on the Hugging Face hub.
        device: a device of torch. ``auto`` = the GPU if there is one, else the CPU.
        dtype: data type of the weights. ``auto`` = float32 on a CPU, bfloat16 on any other device.
        tokens_per_batch: maximum number of tokens per forward pass, padding included. A longer conversation is computed
            alone.
        max_length: maximum number of tokens of a conversation; None = the model's limit, which always applies.
        too_long: what happens to a longer conversation. ``fail``: it gets no score. ``truncate``: tokens at its
            beginning are removed.
        activation: ``sigmoid`` maps the model's output to the range from 0 to 1; ``none`` leaves it as it is.
        chat_template: a chat template that replaces the tokenizer's; None = the tokenizer's.
        trust_remote_code: whether Python code in the model's repository may run.

    Raises:
        UserError: the model cannot be loaded, has more than one label or has no chat template, or an argument is
            invalid.
    """

    own_timeout = True
    calls_service = False

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        too_long: Literal["fail", "truncate"] = "fail",
        activation: Activation = "none",
        chat_template: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.check(
            model,
            device=device,
            dtype=dtype,
            tokens_per_batch=tokens_per_batch,
            max_length=max_length,
            too_long=too_long,
            activation=activation,
        )
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        used_dtype: str = dtype
        if dtype == "auto":
            used_dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            if config.num_labels != 1:
                raise UserError(f"reward model {model} has {config.num_labels} labels; one that scores has one")
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                model, dtype=getattr(torch, used_dtype), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UserError(f"reward model {model} cannot be loaded: {first_line(error)}") from None
        try:
            self._model = loaded.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # the latter if torch was built without the device's library
            raise UserError(f"reward model {model} does not get onto {device}: {first_line(error)}") from None
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if not self._tokenizer.chat_template:
            raise UserError(f"reward model {model}: its tokenizer has no chat template; give chat_template")
        limit = getattr(self._model.config, "max_position_embeddings", None)
        self._max_length = min((n for n in (max_length, limit) if n), default=1 << 30)
        self._truncate, self._sigmoid = too_long == "truncate", activation == "sigmoid"
        self._tokens_per_batch = tokens_per_batch
        self._waiting: list[_Waiting] = []
        self._serving: asyncio.Task[None] | None = None
        self.configure(RewardSettings())
        # Weighted fair queueing between the lanes (training and evaluation): a lane's value grows by 1 / share with
        # each of its conversations that is computed, and the next batch is taken from the lane with the lowest value.
        self._turns = dict.fromkeys(self._shares, 0.0)
        self._turn = 0.0  # value that the lane of the last batch had when the batch was taken
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-reward-model")
        self.version = version_of([model, dtype, self._max_length, too_long, activation, self._tokenizer.chat_template])

    @classmethod
    def check(
        cls,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokens_per_batch: int = 1,
        max_length: int | None = None,
        too_long: str = "fail",
        activation: str = "none",
        **_: Any,
    ) -> None:
        """Check those options that can be checked without loading the model. Raises `UserError` if one is invalid."""
        if not isinstance(model, str) or not model:
            raise UserError("model: give a directory or an id")
        if activation not in ("none", "sigmoid") or too_long not in ("fail", "truncate"):
            raise UserError("activation is none or sigmoid, too_long is fail or truncate")
        if tokens_per_batch < 1:
            raise UserError("tokens_per_batch must be positive")
        if max_length is not None and max_length < 1:
            raise UserError(f"max_length = {max_length!r}: a whole number of at least 1")
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UserError(f"dtype = {dtype!r}: auto, float32, bfloat16 or float16")
        if device != "auto":
            import torch

            try:
                torch.device(device)
            except RuntimeError as error:
                raise UserError(f"device = {device!r}: {first_line(error)}") from None

    def configure(self, settings: RewardSettings) -> None:
        self._timeout_s = settings.timeout_s
        self._shares = {"train": 1.0 - settings.eval_share, "eval": settings.eval_share}

    async def __call__(self, request: Request) -> Score:
        """Score a request.

        Raises:
            Fatal: the conversation is too long, or the output is not a finite number.
            Retryable: its batch took longer than the time limit.
        """
        loop = asyncio.get_running_loop()
        permit = CURRENT_PERMIT.get() or Permit("train")
        waiting = _Waiting([_plain_message(m) for m in request.messages], permit, loop.create_future())
        self._waiting.append(waiting)
        if self._serving is None or self._serving.done():
            # The task starts in the next iteration of the event loop, so all requests made until then join its round.
            self._serving = loop.create_task(self._serve())
        return Score(await waiting.future)

    async def aclose(self) -> None:
        """Cancel all requests. Does not wait until a batch that is being computed ends."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.future.cancel()
        self._thread.shutdown(wait=False)
        # The agent may be opened again. An executor that was shut down accepts no calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-reward-model")

    async def _serve(self) -> None:
        """Compute batches until no request waits any more."""
        loop = asyncio.get_running_loop()
        rounds: dict[str, list[_Waiting]] = {name: [] for name in self._shares}
        while True:
            self._waiting = [one for one in self._waiting if not one.future.done()]  # drop computed and cancelled ones
            for name, left in rounds.items():
                left = [one for one in left if not one.future.done()]
                rounds[name] = left or [one for one in self._waiting if name in one.permit.lanes]
            lanes = [name for name, round_ in rounds.items() if round_]
            if not lanes:
                return
            for name in rounds.keys() - lanes:
                # The value of an idle lane does not grow. Without this line, the lane would overtake all others later.
                self._turns[name] = max(self._turns[name], self._turn)
            lane = min(lanes, key=lambda name: self._turns[name])
            self._turn = self._turns[lane]
            outcomes: list[tuple[_Waiting, float | Fatal | Retryable]] = []
            batch: Sequence[_Waiting] = rounds[lane]
            try:
                # The thread computes a batch to its end. If that took too long, the next one waits for it here.
                async with time_limit(self._timeout_s):
                    batch, failed = await loop.run_in_executor(self._thread, self._next_batch, batch)
                outcomes += failed
                async with time_limit(self._timeout_s):
                    values = await loop.run_in_executor(self._thread, self._compute, [one.tokens for one in batch])
                outcomes += zip(batch, values, strict=True)
            except Exception as error:
                said = error if isinstance(error, Retryable) else _as_fatal(error)
                outcomes += [(one, said) for one in batch]
            self._turns[lane] += len(outcomes) / self._shares[lane]
            for one, outcome in outcomes:
                if one.future.done():
                    continue
                if isinstance(outcome, Fatal | Retryable):
                    one.future.set_exception(outcome)
                else:
                    one.future.set_result(outcome)

    # --- in the thread ----------------------------------------------------------------------------
    def _next_batch(self, round_: Sequence[_Waiting]) -> tuple[list[_Waiting], list[tuple[_Waiting, Fatal]]]:
        """Encode the requests of a round, and return the longest of them that fit into one batch.

        The second result holds the requests that cannot be encoded, with their errors. Runs in the model's thread.
        """
        failed: list[tuple[_Waiting, Fatal]] = []
        encoded: list[_Waiting] = []
        for one in round_:
            try:
                if not one.tokens:
                    chat = self._tokenizer.apply_chat_template(one.messages, tokenize=True, return_dict=True)
                    tokens = list(chat["input_ids"])
                    if not tokens:
                        raise Fatal("the chat template makes nothing of this conversation", cause="request")
                    if len(tokens) > self._max_length and not self._truncate:
                        text = f"{len(tokens)} tokens, and the reward model takes {self._max_length}"
                        raise Fatal(text, cause="too_long")
                    one.tokens = tokens[-self._max_length :]
                encoded.append(one)
            except Exception as error:  # concerns only this conversation, so the others are still computed
                failed.append((one, _as_fatal(error)))
        if not encoded:
            return [], failed
        # The longest conversations come first, so that memory runs out in the first batch of a round or in none.
        encoded.sort(key=lambda one: len(one.tokens), reverse=True)
        rows = max(1, self._tokens_per_batch // len(encoded[0].tokens))
        return [one for one in encoded if not one.future.done()][:rows], failed

    def _compute(self, rows: list[list[int]]) -> list[float | Fatal]:
        """Return the model's output, or an error, for each row of token ids.

        A batch that does not fit into memory is divided into two halves, which are computed one after the other.
        """
        import torch

        if not rows:
            return []
        try:
            with torch.inference_mode():
                logits = self._forward(rows)
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                return [Fatal(f"{len(rows[0])} tokens do not fit into memory: {error}", cause="memory")]
            half = len(rows) // 2
            return [*self._compute(rows[:half]), *self._compute(rows[half:])]
        except Exception as error:  # concerns only this batch, so the other batches are still computed
            return [_as_fatal(error)] * len(rows)
        values: list[float | Fatal] = []
        for value in (torch.sigmoid(logits) if self._sigmoid else logits).tolist():
            finite_value = math.isfinite(value)
            values.append(value if finite_value else Fatal(f"the model's output is {value}", cause="not_a_number"))
        return values

    def _forward(self, rows: list[list[int]]) -> torch.Tensor:
        """Return the model's output for each row of token ids as float32[rows], on the CPU."""
        import torch

        # The model reads the score at the last token of a row that is not the padding token. If its configuration has
        # no padding token, a token that occurs in none of the rows is used.
        config = self._model.config.get_text_config()
        own = config.pad_token_id
        used = {token for row in rows for token in row}
        padding = own if own is not None else next((t for t in range(config.vocab_size) if t not in used), None)
        longest = max(map(len, rows))
        if padding is None and len(rows) > 1:
            return torch.cat([self._forward([row]) for row in rows])
        ids = torch.tensor([row + [padding or 0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        try:
            config.pad_token_id = own if padding is None else padding
            device = self._model.device
            return self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0].float().cpu()
        finally:
            config.pad_token_id = own


def _as_fatal(error: Exception) -> Fatal:
    return error if isinstance(error, Fatal) else Fatal(f"{type(error).__name__}: {first_line(error)}", cause="model")


class PoolingServer(ServiceScorer):
    """Scores with a reward model on a vLLM server, through its endpoint ``/classify`` or ``/pooling``.

    Both endpoints accept a conversation and apply the model's own chat template to it.

    Args:
        base_url: address of the server, without ``/v1``, e.g. ``http://localhost:8000``; ``"env:NAME"`` is read from
            the environment variable NAME.
        model: the model's name on the server.
        endpoint: ``classify`` for classification models with one label, ``pooling`` for other models that return one
            number.
        extra: additional fields of the request's body, e.g. ``{"use_activation": false}``.
        connection: ``api_key_env``, ``headers``, ``timeout_s``, ``connections`` of `gleanrl.utils.http.HttpClient`.

    Raises:
        UserError: an argument is invalid, or an environment variable is not set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        endpoint: Literal["classify", "pooling"] = "classify",
        extra: Mapping[str, Any] | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        if endpoint not in ("classify", "pooling"):
            raise UserError(f"endpoint = {endpoint!r}: classify or pooling")
        super().__init__(HttpClient(base_url, setting="base_url", **connection))
        self._endpoint, self._body = endpoint, {**self._client.hide_keys(extra or {}), "model": model}
        self.version = version_of([{**(extra or {}), "model": model}, endpoint])

    async def __call__(self, request: Request) -> Score:
        """Return the score that the server gives. Raises `Retryable` or `Fatal` if it gives none."""
        messages = [_plain_message(message) for message in request.messages]
        body = {**self._body, "messages": messages}
        key = idempotency_key(request, self.version)
        answer = await self._client.request("POST", f"/{self._endpoint}", body, idempotency_key=key)
        cost = read_cost(answer)
        try:
            found = answer["data"][0]["probs" if self._endpoint == "classify" else "data"]
        except (KeyError, IndexError, TypeError):
            no_data = f"{self._client.url}/{self._endpoint}: no data in the answer"
            raise Fatal(no_data, cause="answer", cost=cost) from None
        while isinstance(found, list) and len(found) == 1:
            found = found[0]
        value = finite(found)
        if value is None:
            what = f"{len(found)} numbers" if isinstance(found, list) else self._client.quote(repr(found))
            said = f"{self._client.url}/{self._endpoint}: {what} instead of one score"
            raise Fatal(said, cause="answer", cost=cost)
        return Score(value, parts=cost)


def _plain_message(message: Message) -> Message:
    """Return a copy of a message with only the fields that chat templates support: role, content and tool calls."""
    plain: Message = {"role": message["role"], "content": message["content"] or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = calls
    return plain
