"""Samples from a server with OpenAI's completions API, such as a vLLM server.

Prompts and completions are exchanged as token ids, because text might be tokenised differently. The server must return
the ids of the sampled tokens and their log-probs at the sampling temperature. This is checked before the first episode.

To train, the server must accept new weights. A vLLM server can do so with
`gleanrl.samplers.vllm.WorkerExtension`, if it shares a folder with this machine. Any other server can be used for
evaluation only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.samplers import answer_limit
from gleanrl.types import IntArray
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient
from gleanrl.utils.notifier import Notifier
from gleanrl.utils.retry import Fatal, Retryable, RetryPolicy
from gleanrl.utils.text import nearest

RETRIES = RetryPolicy(attempts=4, backoff_s=2.0)
TESTED = 16  # number of tokens that the server samples when its weights are compared
TEST_TEMPERATURE = 0.7  # not 1, to notice a server that returns log-probs at temperature 1 whatever is requested
WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields of a request that turn truncation and penalties off, so that the server samples from the whole distribution.
Without them, a server applies the defaults in the model's generation config."""
EXACT = {"ignore_eos": True, "skip_special_tokens": False, "add_special_tokens": False}
Update = Literal["none", "vllm"]


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]  # "stop": the last token is a stop token
    # Log-probs of the prompt's tokens from the second on. None if they were not requested, or the server returns none.
    prompt: list[float] | None = None


class OpenAISampler:
    """Implements `gleanrl.protocols.Sampler` with requests to the endpoint ``/completions`` of a server.

    The first session or publication raises `UserError` if the server cannot be reached, does not return token ids and
    log-probs, or serves other weights.

    Args:
        model: the served model as a Hugging Face causal LM. The server's log-probs of a test prompt are compared with
            those of this model.
        max_rows: largest number of open sessions. Further sessions wait in the order in which they were requested.
        max_context: largest length of prompt and completion together, in tokens.
        deterministic: ignored, because the server schedules its own work.
        device_lock: ignored, for the same reason.
        timeline: ignored, for the same reason.
        inflight: whether `publish` sends new weights while sessions are open. If False, it waits until all sessions
            have closed.
        dtype: the run's compute dtype. The server is assumed to compute in it too, which determines by how much its
            log-probs may differ.
        base_url: address of the API, for example ``http://localhost:8000/v1``.
        served_model: the model's name on the server.
        update: "none" if the weights on the server never change, or "vllm" to write new weights to a file in
            ``folder``, which the server then reads. For this, start vLLM with ``VLLM_SERVER_DEV_MODE=1`` and
            ``--worker-extension-cls gleanrl.samplers.vllm.WorkerExtension``.
        folder: folder for that file, which this machine and the server can access. None = the system's folder for
            temporary files, which suits a server on the same machine.
        extra: additional fields of the body of each request.
        server_dtype: "float32", "bfloat16" or "float16", if the server computes in another dtype than the run.
        connection: the options ``api_key_env``, ``headers``, ``timeout_s`` and ``connections`` of
            `gleanrl.utils.http.HttpClient`.

    Raises:
        UserError: if an option is invalid, or aiohttp is not installed.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 256,
        max_context: int,
        deterministic: bool = False,
        inflight: bool = False,
        dtype: Any = None,
        device_lock: Any = None,
        timeline: Any = None,
        base_url: str = "",
        served_model: str = "",
        update: Update = "none",
        folder: str | None = None,
        extra: Mapping[str, Any] | None = None,
        server_dtype: str | None = None,
        **connection: Any,
    ) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError("sampler.name = 'openai' needs aiohttp: pip install 'gleanrl[rewards]'")
        own = ("base_url", "served_model", "update", "folder", "extra", "server_dtype")
        known = (*own, *ConnectionOptions.__annotations__)
        if unknown := sorted(set(connection) - set(known)):
            raise UserError(f"sampler.options: a server's sampler has no {unknown[0]!r}{nearest(unknown[0], known)}")
        if not served_model:
            raise UserError("sampler.options.served_model: give the model's name on the server")
        if server_dtype not in (None, "float32", "float16", "bfloat16"):
            raise UserError(f"sampler.options.server_dtype = {server_dtype!r}: float32, float16 or bfloat16")
        if update not in ("none", "vllm"):
            raise UserError(f"sampler.options.update = {update!r}: none or vllm")
        fixed = {"logprobs": 1, "return_token_ids": True, **WHOLE, **EXACT}
        if taken := sorted(fixed.keys() & (extra or {}).keys()):
            raise UserError(
                f"sampler.options.extra: {taken[0]} is {json.dumps(fixed[taken[0]])} in every request, so that the "
                "recorded log-probs are those of the policy"
            )
        # Imported here, because the canary imports torch, which an import of this module must not load.
        from gleanrl.samplers.canary import Canary

        self._client = HttpClient(base_url, setting="sampler.options.base_url", **connection)
        if update == "vllm" and base_url.startswith("env:"):
            raise UserError("sampler.options.base_url: update = 'vllm' needs the address itself, not env:NAME")
        root = base_url.rstrip("/").removesuffix("/v1")
        self._admin = HttpClient(root, setting="sampler.options.base_url", **connection)
        self._body = {"model": served_model, **fixed, **(extra or {})}
        # The canary, which compares the server's log-probs with the model's, copies the model's modules. It is made
        # now, because the learner may later add adapters to the model or shard it.
        self._dtype = server_dtype or dtype or "float32"
        self._canary = Canary(model, self._dtype, self._client.url, max_context)
        # Weights with which the server is compared in the first session, unless weights are published before.
        self._initial: Mapping[str, Any] = dict(model.named_parameters())
        self._canary.remember(self._canary.reference(self._initial))
        self._max_context, self._inflight = max_context, inflight
        self._update, self._folder = update, folder
        self._version = 0
        self._stats = {"prompt_tokens": 0.0, "sampled_tokens": 0.0, "reused_tokens": 0.0, "requests": 0.0}
        self._rows = max_rows
        self._line: list[object] = []  # one object for each waiting session, in the order in which they were requested
        self._open = 0  # number of open sessions
        self._draining = self._closed = False
        self._uncertain = False  # True after a failed publication, because the server may have any weights
        self._changed = Notifier()
        self._publishing = asyncio.Lock()
        self._comparing = asyncio.Lock()
        self._compared = False  # whether the server's weights have been compared with the model's or published ones
        self._format_checked = False

    @property
    def version(self) -> int:
        """Version of the weights that were published last."""
        return self._version

    def stats(self) -> dict[str, float]:
        """Return totals since the start: requests, prompt tokens, sampled tokens and reused tokens.

        Reused tokens are prompt tokens that the server found in its prefix cache.
        """
        return dict(self._stats)

    # --- sessions -------------------------------------------------------------------------------
    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[_Session]:
        """See `Sampler.session`."""
        place = object()
        self._line.append(place)
        try:
            while not self._closed and (self._draining or self._open == self._rows or self._line[0] is not place):
                await self._changed.wait()
            self._check_open()
        finally:
            self._line.remove(place)
            self._changed.notify()
        self._open += 1
        try:
            async with self._comparing:
                if not self._compared:
                    await self._compare(self._initial)
            yield _Session(self, seed)
        finally:
            self._open -= 1
            self._changed.notify()

    async def _ask(
        self, prompt: Sequence[int], limit: int, temperature: float, seed: int, stop: Sequence[int], **more: Any
    ) -> _Answer:
        """Request one completion of ``prompt`` with at most ``limit`` tokens, and return the server's answer.

        ``stop`` holds the ids of the stop tokens, and ``more`` further fields of the request's body.

        Raises:
            UserError: if the server does not answer, or its answer is incomplete or invalid.
        """
        body = {"prompt": list(prompt), "max_tokens": limit, "temperature": temperature, "seed": seed, **more}
        answer = await self._post({**self._body, **body, "stop_token_ids": list(stop)}, "/completions")
        url = self._client.url
        try:
            choice = answer["choices"][0]
            given, finish = choice.get("logprobs") or {}, choice["finish_reason"]
            tokens, logprobs = choice.get("token_ids"), given.get("token_logprobs")
            if tokens is None:  # vLLM with --return-tokens-as-token-ids returns token ids as text
                tokens = [int(text.removeprefix("token_id:")) for text in given["tokens"]]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            choice, tokens, logprobs, finish = {}, None, None, None
        if choice.get("prompt_token_ids") not in (None, body["prompt"]):
            raise UserError(f"{url} answered with the completion of another prompt")
        if not tokens or not logprobs:
            missing = "token ids" if not tokens else "log-probs"
            raise UserError(
                f"{url} returns no {missing} with its completions (return_token_ids, logprobs), and what was sampled "
                "cannot be trained on or compared without; vLLM returns both"
            )
        sound = all(isinstance(value, int | float) and math.isfinite(value) and value < 1e-3 for value in logprobs)
        if len(tokens) != len(logprobs) or len(tokens) > limit or not sound:
            raise UserError(f"{url} returned {len(tokens)} tokens and {len(logprobs)} log-probs of {limit}")
        if finish not in ("stop", "length"):
            raise UserError(f"{url} ended a completion with {finish!r}")
        if finish == "stop" and tokens[-1] not in stop:
            raise UserError(f"{url} stopped at a token that is no stop token, or does not return it")
        try:  # prompt log-probs in vLLM's format; other servers return none
            rest = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            before = [float(position[str(token)]["logprob"]) for position, token in rest]
        except (KeyError, TypeError, ValueError):
            before = None
        usage = answer.get("usage") or {}
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(prompt)
        self._stats["sampled_tokens"] += len(tokens)
        self._stats["reused_tokens"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return _Answer(tokens, logprobs, finish, before)

    async def _post(self, body: Mapping[str, Any], path: str, client: HttpClient | None = None) -> Any:
        client = client or self._client
        try:
            return await RETRIES.run(lambda: client.request("POST", path, body))
        except Fatal as error:
            raise UserError(f"sampler.options.base_url: {error}") from None
        except Retryable as error:
            raise UserError(f"sampler.options.base_url, tried {RETRIES.attempts} times: {error}") from None

    async def _compare(self, weights: Mapping[str, Any]) -> None:
        """Check that the server samples with ``weights`` and returns log-probs at the sampling temperature.

        The caller must hold the lock `_comparing`.

        Raises:
            UserError: if the server leaves out stop tokens, does not return token ids and log-probs, or its log-probs
                of a test prompt differ from those under ``weights``.
        """
        canary, url = self._canary, self._client.url
        if not self._format_checked:
            first = await self._ask(canary.prompt, 1, 0.0, 0, ())
            stopped = await self._ask(canary.prompt, 4, 0.0, 0, first.tokens)
            if stopped.tokens != first.tokens or stopped.finish != "stop":
                raise UserError(f"{url} does not stop at stop_token_ids, or leaves the stop token out")
            self._format_checked = True
        when = "at the start" if self._version == 0 else "after an update"
        answer = await self._ask(canary.prompt, TESTED, TEST_TEMPERATURE, 0, (), prompt_logprobs=0)
        reference = await asyncio.to_thread(canary.reference, weights, answer.tokens)
        if reference.distance(answer.logprobs, TEST_TEMPERATURE)[1] <= canary.tolerance:
            if answer.prompt is not None:  # servers compute the log-probs of a prompt at temperature 1
                canary.compare_with_held(reference, answer.prompt, when)
            self._compared, self._initial = True, {}
            return
        off, share = reference.distance(answer.logprobs)
        if share <= canary.tolerance:
            raise UserError(
                f"{url} returns log-probs of temperature 1, not of the sampling temperature; start vLLM "
                "with --logprobs-mode processed_logprobs"
            )
        if self._update == "none":
            raise UserError(
                f"{url} does not serve these weights (log-probs are off by {off:.2g}) and cannot take "
                "them: sampler.options.update = 'none' is for the evaluation of what is served"
            )
        canary.compare(reference, answer.logprobs, when)

    # --- publication ----------------------------------------------------------------------------
    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """See `Sampler.publish`. The caller must not change ``weights`` before this method returns.

        After an error while the server loads weights, nothing is sampled until a later publication succeeds.

        Raises:
            ValueError: if a weight is missing, unknown or has another shape. The old weights then stay in use.
            UserError: if the server does not load the weights, or its log-probs differ from those under the weights.
        """
        async with self._publishing:
            self._check_open()
            self._canary.check_fit(weights)
            try:
                if not self._inflight:
                    self._draining = True
                    while self._open:
                        await self._changed.wait()
                try:
                    if self._update == "vllm":
                        await self._send(weights)
                    async with self._comparing:
                        await self._compare(weights)
                except BaseException:
                    self._uncertain = self._update == "vllm"
                    raise
                self._version, self._uncertain = version, False
            finally:
                self._draining = self._uncertain
                self._changed.notify()

    async def _send(self, weights: Mapping[str, Any]) -> None:
        """Make a vLLM server load ``weights`` from a file.

        Running requests are paused meanwhile. Then they continue with the new weights, which compute the keys and
        values of their contexts again.

        Raises:
            UserError: if a worker of the server has not loaded the file, or the server keeps cached prefixes.
        """
        from gleanrl.samplers.vllm import write_published

        with tempfile.TemporaryDirectory(dir=self._folder, prefix="gleanrl-weights-") as folder:
            path = Path(folder) / "model.safetensors"
            mark = await asyncio.to_thread(write_published, path, weights, self._dtype)
            try:
                await self._post({}, "/pause?mode=keep", self._admin)
                order = {"method": "load_published", "args": [str(path)]}
                taken = (await self._post(order, "/collective_rpc", self._admin) or {}).get("results")
                if not taken or set(taken) != {mark}:
                    raise UserError(
                        f"{self._client.url} does not say that it took new weights; it needs this version of gleanrl "
                        "next to it"
                    )
                reset = await self._post({}, "/reset_prefix_cache?reset_running_requests=true", self._admin)
                if not (reset or {}).get("success", True):
                    raise UserError(f"{self._client.url} kept prefixes that older weights computed")
            except BaseException:  # the server may have paused even if its answer is an error or was not awaited
                with suppress(UserError):  # the first error gives the reason
                    await self._post({}, "/resume", self._admin)
                raise
            await self._post({}, "/resume", self._admin)

    async def rest(self) -> None:
        """See `Sampler.rest`. Does nothing, because the server has memory of its own."""

    async def close(self) -> None:
        """Close the sampler and its connections. The server keeps running. A second call does nothing."""
        self._closed = True
        self._changed.notify()
        await self._client.aclose()
        await self._admin.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler has closed")

    def _check_certain(self) -> None:
        if self._uncertain:
            raise RuntimeError(f"it is not known which weights {self._client.url} has, because a publication failed")


class _Session:
    """One episode's access to the sampler; see `gleanrl.protocols.Session`."""

    def __init__(self, sampler: OpenAISampler, seed: int) -> None:
        self._sampler = sampler
        self._random = np.random.Generator(np.random.Philox(seed))  # draws a seed for each request of this session

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`.

        Raises:
            RuntimeError: if the sampler has closed, or a publication failed and no later one has succeeded.
        """
        sampler, prompt = self._sampler, np.asarray(prompt, np.int32)
        sampler._check_open()
        limit, version = answer_limit(prompt, params, sampler._max_context), sampler._version
        seed = int(self._random.integers(2**31)) if params.seed is None else params.seed % 2**31
        sampler._check_certain()
        answer = await sampler._ask(prompt.tolist(), limit, params.temperature, seed, params.stop_tokens)
        sampler._check_certain()  # the publication may have failed while the server sampled
        tokens, logprobs = np.array(answer.tokens, np.int32), np.array(answer.logprobs, np.float32)
        return Completion(tokens, logprobs, version, answer.finish)
