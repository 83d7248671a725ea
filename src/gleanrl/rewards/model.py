"""Scores with reward models: a sequence-classification model in this process, or a pooling server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.http import ServiceScorer, idempotency_key, read_cost, version_of
from gleanrl.rewards.limits import CURRENT_PERMIT, Permit
from gleanrl.rewards.request import Request, Scorer, finite
from gleanrl.types import Message, Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient
from gleanrl.utils.retry import Fatal
from gleanrl.utils.text import first_line

if TYPE_CHECKING:
    import torch

Activation = Literal["none", "sigmoid"]


@dataclass(slots=True, eq=False)
class _Waiting:
    messages: list[Message]
    permit: Permit
    future: asyncio.Future[float]
    tokens: list[int] | None = None  # token ids of the messages, once encoded


class RewardModel(Scorer):
    """Scores with a Hugging Face sequence-classification model with one label, on a device and a thread of its own.

    Requests that arrive while one round is computed form the next round, divided into batches of about equal lengths.
    A single request starts at once. Training and evaluation have separate rounds, whose batches take turns in
    proportion to the shares of both.
    A score does not depend on the rest of its batch, except for rounding.

    Args:
        model: a directory or an id on the Hugging Face hub.
        device: ``auto`` is a GPU if there is one.
        dtype: ``auto`` is bfloat16 on a GPU, float32 on a CPU.
        tokens_per_batch: padded tokens per forward pass.
        max_length: maximum tokens of a conversation; None is the model's own limit.
        too_long: handling of longer conversations. ``fail``: no score; ``truncate``: their beginning is left out.
        activation: ``sigmoid`` maps the model's output to 0..1.
        chat_template: replaces the tokenizer's own.
        trust_remote_code: allow code in the model's folder to run.

    Raises:
        UserError: there is no such model, it has several labels, or there is no chat template.
    """

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
        self.check(model, tokens_per_batch=tokens_per_batch, too_long=too_long, activation=activation)
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
        self._model = loaded.to(device).eval()
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
        # a lane's value grows by 1 / share with each row; the lane with the lowest value goes next
        self._turns = dict.fromkeys(self._shares, 0.0)
        self._turn = 0.0  # value of the lane that went last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-reward-model")
        self.version = version_of([model, dtype, self._max_length, too_long, activation, self._tokenizer.chat_template])
        self.batches: list[int] = []
        """Sizes of the batches computed so far."""

    @classmethod
    def check(
        cls,
        model: str,
        *,
        tokens_per_batch: int = 1,
        too_long: str = "fail",
        activation: str = "none",
        **_: Any,
    ) -> None:
        """Check the options as far as possible without the model. Raises `UserError` if one is invalid."""
        if not isinstance(model, str) or not model:
            raise UserError("model: give a directory or an id")
        if activation not in ("none", "sigmoid") or too_long not in ("fail", "truncate"):
            raise UserError("activation is none or sigmoid, too_long is fail or truncate")
        if tokens_per_batch < 1:
            raise UserError("tokens_per_batch must be positive")

    def configure(self, settings: RewardSettings) -> None:
        self._shares = {"train": 1.0 - settings.eval_share, "eval": settings.eval_share}

    async def __call__(self, request: Request) -> Score:
        """Score a request. Raises `Fatal` if the conversation is too long or the output is not a finite number."""
        loop = asyncio.get_running_loop()
        permit = CURRENT_PERMIT.get() or Permit("train")
        waiting = _Waiting([_plain_message(m) for m in request.messages], permit, loop.create_future())
        self._waiting.append(waiting)
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())  # further requests of this turn of the loop join the round
        return Score(await waiting.future)

    async def aclose(self) -> None:
        """Cancel all requests. Does not wait for a batch that runs."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.future.cancel()
        self._thread.shutdown(wait=False)

    async def _serve(self) -> None:
        """Compute batches until no request waits."""
        loop = asyncio.get_running_loop()
        rounds: dict[str, list[_Waiting]] = {name: [] for name in self._shares}
        while True:
            self._waiting = [one for one in self._waiting if not one.future.done()]  # some were cancelled or computed
            for name, left in rounds.items():
                left = [one for one in left if not one.future.done()]
                rounds[name] = left or [one for one in self._waiting if name in one.permit.lanes]
            lanes = [name for name, round_ in rounds.items() if round_]
            if not lanes:
                return
            for name in rounds.keys() - lanes:
                self._turns[name] = max(self._turns[name], self._turn)  # an idle lane gains no priority
            lane = min(lanes, key=lambda name: self._turns[name])
            self._turn = self._turns[lane]
            try:
                outcomes = await loop.run_in_executor(self._thread, self._compute_batch, rounds[lane])
            except Exception as error:
                outcomes = [(one, _as_fatal(error)) for one in rounds[lane]]
            self._turns[lane] += len(outcomes) / self._shares[lane]
            for one, outcome in outcomes:
                if one.future.done():
                    continue
                if isinstance(outcome, Fatal):
                    one.future.set_exception(outcome)
                else:
                    one.future.set_result(outcome)

    # --- in the thread ----------------------------------------------------------------------------
    def _compute_batch(self, round_: Sequence[_Waiting]) -> list[tuple[_Waiting, float | Fatal]]:
        """Compute the requests of a round that fit into one batch. Returns each request done, with its outcome."""
        outcomes: list[tuple[_Waiting, float | Fatal]] = []
        encoded: list[tuple[list[int], _Waiting]] = []
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
                encoded.append((one.tokens, one))
            except Exception as error:  # only this conversation cannot be encoded
                outcomes.append((one, _as_fatal(error)))
        if not encoded:
            return outcomes
        # the largest first, so that a batch too large for memory fails at once
        encoded.sort(key=lambda pair: len(pair[0]), reverse=True)
        rows = max(1, self._tokens_per_batch // len(encoded[0][0]))
        batch = [pair for pair in encoded if not pair[1].future.done()][:rows]
        values = self._compute([tokens for tokens, _ in batch])
        outcomes += [(one, value) for (_, one), value in zip(batch, values, strict=True)]
        return outcomes

    def _compute(self, rows: list[list[int]]) -> list[float | Fatal]:
        """Return the model's outputs. A batch that does not fit into memory is halved and computed in two parts."""
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
        except Exception as error:  # concerns this batch only
            return [_as_fatal(error)] * len(rows)
        self.batches.append(len(rows))
        values: list[float | Fatal] = []
        for value in (torch.sigmoid(logits) if self._sigmoid else logits).tolist():
            finite_value = math.isfinite(value)
            values.append(value if finite_value else Fatal(f"the model's output is {value}", cause="not_a_number"))
        return values

    def _forward(self, rows: list[list[int]]) -> torch.Tensor:
        """Return the model's outputs, float32[rows]."""
        import torch

        # The model takes its score at the last token that is not padding, so padding must differ from content.
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
    """Scores with a reward model behind vLLM's ``/classify`` or ``/pooling``.

    Both take a conversation and use the model's own chat template.

    Args:
        base_url: address of the server, without ``/v1``: ``http://localhost:8000``.
        model: the model's name on the server.
        endpoint: ``classify`` for models with one label, ``pooling`` for others that return one number.
        extra: additional fields of the request's body, e.g. ``{"use_activation": false}``.
        connection: ``api_key_env``, ``headers``, ``timeout_s``, ``connections`` of `gleanrl.utils.http.HttpClient`.
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
        """Score a request. Raises `Retryable` or `Fatal` if there is no score."""
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
    """Return the fields of a message that chat templates support."""
    plain: Message = {"role": message["role"], "content": message["content"] or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = calls
    return plain
