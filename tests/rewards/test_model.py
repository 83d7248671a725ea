"""Tests of `gleanrl.rewards.model`: `RewardModel` with a tiny random classifier that is made here, and `PoolingServer`
against a scripted HTTP server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from gleanrl.rewards import RewardAgent
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.model import PoolingServer, RewardModel
from gleanrl.rewards.request import Request
from gleanrl.types import Message, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal
from tests.rewards.service import Plan, Service, group_scored

WORDS = ["<unk>", "<user>", "<assistant>", *(f"w{i}" for i in range(40))]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


def saved(folder: Path, labels: int = 1, template: str | None = TEMPLATE, pad: int | None = None) -> str:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.5,
            pad_token_id=pad,
        )
        config.num_labels = labels
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model"))


def asked(index: int, words: int | None = None) -> Request:
    length = 1 + index * 7 % 13 if words is None else words
    said = " ".join(f"w{(index * 11 + i * 5) % 40}" for i in range(length))
    messages: tuple[Message, ...] = ({"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": said})
    return Request(Task("t"), messages, str(index))


@cache
def reference(folder: str) -> Any:
    return LlamaForSequenceClassification.from_pretrained(folder).eval()


def alone(folder: str, request: Request) -> float:
    """Return the model's score of one conversation, computed without batching and padding."""
    model = reference(folder)
    text = "".join(f"<{m['role']}> {m['content']} " for m in request.messages)
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    with torch.inference_mode():
        return float(model(input_ids=ids).logits[0, 0])


async def together(model: RewardModel, requests: list[Request]) -> list[float]:
    return [score.value for score in await asyncio.gather(*(model(request) for request in requests))]


def record_batches(model: RewardModel) -> list[int]:
    """Return a list to which the model appends the number of conversations in each batch that it computes."""
    batches: list[int] = []
    forward = model._forward

    def recorded(rows: list[list[int]]) -> torch.Tensor:
        batches.append(len(rows))
        return forward(rows)

    model._forward = recorded  # type: ignore[method-assign]
    return batches


# the padding token: none is set, a token that is in no text, or a token of the texts
@pytest.mark.parametrize("pad", [None, 0, 5])
def test_a_score_does_not_depend_on_the_rest_of_its_batch(tmp_path: Path, pad: int | None) -> None:
    folder = saved(tmp_path, pad=pad)
    requests = [asked(i) for i in range(30)]
    model = RewardModel(folder, tokens_per_batch=128)
    batches = record_batches(model)
    values = asyncio.run(together(model, requests))
    assert values == pytest.approx([alone(folder, request) for request in requests], abs=1e-5)
    assert len({round(value, 4) for value in values}) > 20
    assert 2 < len(batches) < 15
    assert sum(batches) == 30


def test_requests_that_arrive_during_a_forward_pass_form_the_next_batch(folder: str) -> None:
    model = RewardModel(folder)
    batches = record_batches(model)
    entered, go = threading.Event(), threading.Event()
    forward = model._forward

    def held(rows: list[list[int]]) -> torch.Tensor:
        entered.set()
        assert go.wait(30)
        return forward(rows)

    model._forward = held  # type: ignore[method-assign]

    async def main() -> list[float]:
        first = asyncio.create_task(model(asked(0)))
        await asyncio.to_thread(entered.wait, 30)
        rest = [asyncio.create_task(model(asked(i))) for i in range(1, 9)]
        given_up = asyncio.create_task(model(asked(9)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        go.set()
        return [score.value for score in await asyncio.gather(first, *rest)]

    values = asyncio.run(main())
    assert values == pytest.approx([alone(folder, asked(i)) for i in range(9)], abs=1e-5)
    assert batches == [1, 8]


@pytest.mark.parametrize("summed", [False, True])
def test_waiting_for_other_batches_does_not_count_towards_the_timeout(folder: str, summed: bool) -> None:
    model = RewardModel(folder, tokens_per_batch=1)  # so each batch holds one conversation
    forward = model._forward
    slow = True

    def delayed(rows: list[list[int]]) -> torch.Tensor:
        nonlocal slow
        time.sleep(0.06)
        if slow and len(rows[0]) == 64:
            slow = False
            time.sleep(2.0)
        return forward(rows)

    model._forward = delayed  # type: ignore[method-assign]

    async def main() -> list[Any]:
        reward = Weighted({"model": model}) if summed else model
        async with RewardAgent(reward, timeout_s=1.4, attempts=2, backoff_s=0.01) as agent:
            # 1.8 s of work; the longest conversation is computed first, and its first attempt takes too long
            requests = [*map(asked, range(29)), asked(29, words=60)]
            scores = await asyncio.gather(*(agent.score(request.task, request.messages) for request in requests))
            assert agent.metrics()["service/retries"] == 1
            return list(scores)

    scores = asyncio.run(main())
    assert all(score.valid for score in scores)
    assert scores[29].value == pytest.approx(alone(folder, asked(29, words=60)), abs=1e-5)


def test_batches_hold_conversations_of_similar_length(folder: str) -> None:
    model = RewardModel(folder, tokens_per_batch=100)
    batches = record_batches(model)
    requests = [asked(i, words=2 if i % 2 else 40) for i in range(12)]  # 6 or 44 tokens each
    asyncio.run(together(model, requests))
    assert batches == [2, 2, 2, 6]


def test_a_model_whose_agent_is_opened_again_scores_as_at_first(folder: str) -> None:
    async def main() -> list[Any]:
        agent, request = RewardAgent("model", options={"model": folder}, cache=0), asked(0)
        scores = []
        for _ in range(2):
            async with agent:
                scores.append(await agent.score(request.task, request.messages))
        return scores

    first, again = asyncio.run(main())
    assert first.valid
    assert again == first


def test_a_conversation_longer_than_the_context_fails_without_affecting_others(folder: str) -> None:
    async def main() -> list[Any]:
        model = RewardModel(folder, activation="sigmoid")
        results = await asyncio.gather(
            *(model(asked(i, words=n)) for i, n in enumerate([3, 61, 5])), return_exceptions=True
        )
        await model.aclose()
        return results

    first, long, last = asyncio.run(main())
    assert isinstance(long, Fatal)
    assert str(long) == "65 tokens, and the reward model takes 64"
    for i, score in ((0, first), (2, last)):
        raw = torch.tensor(alone(folder, asked(i, words=[3, 0, 5][i])))
        assert score.value == pytest.approx(torch.sigmoid(raw).item(), abs=1e-6)


def test_too_long_truncate_cuts_the_beginning_of_a_long_conversation(folder: str) -> None:
    long = asyncio.run(together(RewardModel(folder, too_long="truncate", max_length=8), [asked(3, words=30)]))[0]
    model = reference(folder)
    words = asked(3, words=30).response.split()[-8:]
    with torch.inference_mode():
        ids = torch.tensor([[WORDS.index(word) for word in words]])
        assert long == pytest.approx(float(model(input_ids=ids).logits[0, 0]), abs=1e-5)


def test_a_batch_that_runs_out_of_memory_is_halved(folder: str) -> None:
    model = RewardModel(folder)
    batches = record_batches(model)
    forward = model._forward

    def small(rows: list[list[int]]) -> torch.Tensor:
        if len(rows) > 3 or any(len(row) > 40 for row in rows):
            raise torch.OutOfMemoryError("out of memory")
        return forward(rows)

    model._forward = small  # type: ignore[method-assign]
    requests = [asked(i) for i in range(10)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(model(r) for r in [*requests, asked(10, words=50)]), return_exceptions=True)

    *scores, last = asyncio.run(main())
    assert [s.value for s in scores] == pytest.approx([alone(folder, request) for request in requests], abs=1e-5)
    assert isinstance(last, Fatal)
    assert "do not fit into memory" in str(last)
    assert max(batches) <= 3


def test_a_nan_output_raises_fatal(folder: str) -> None:
    model = RewardModel(folder)
    with torch.no_grad():
        model._model.score.weight.fill_(float("nan"))
    with pytest.raises(Fatal, match="output is nan"):
        asyncio.run(together(model, [asked(0)]))


def test_the_agent_scores_groups_with_a_reward_model(folder: str) -> None:
    async def main() -> list[float]:
        async with RewardAgent("gleanrl.rewards.model:RewardModel", options={"model": folder}) as agent:
            group = [(request.task, list(request.messages)) for request in map(asked, range(12))]
            return [score.value for score in await group_scored(agent, group)]

    assert asyncio.run(main()) == pytest.approx([alone(folder, asked(i)) for i in range(12)], abs=1e-5)


def test_unusable_models_and_options_raise_a_user_error(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UserError, match="2 labels"):
        RewardModel(saved(tmp_path / "two", labels=2))
    with pytest.raises(UserError, match="no chat template"):
        RewardModel(saved(tmp_path / "mute", template=None))
    with pytest.raises(UserError, match="cannot be loaded") as error:
        RewardModel(str(tmp_path / "nothing"))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="too_long"):
        RewardModel(folder, too_long="ignore")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not get onto cuda:7"):
        RewardModel(folder, device="cuda:7")
    assert RewardModel(folder).version != RewardModel(folder, activation="sigmoid").version


def test_importing_rewards_does_not_import_torch() -> None:
    code = (
        "import sys, gleanrl.rewards, gleanrl.rewards.model, gleanrl.rewards.judge, gleanrl.rewards.compose;"
        "print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# --- pooling server ------------------------------------------------------------------------------------
@pytest.mark.parametrize("endpoint", ["classify", "pooling"])
def test_a_pooling_server_scores_through_both_endpoints(endpoint: Any) -> None:
    async def main() -> Service:
        async with Service() as service:
            model = PoolingServer(service.url, "rm", endpoint=endpoint, extra={"use_activation": False})
            request = Request(Task("t"), ({"role": "assistant", "content": "worth -1.5"},))
            score = await model(request)
            assert (score.value, score.parts) == (-1.5, {"cost/prompt_tokens": 5.0})
            assert service.headers[0]["idempotency-key"] == request.key(model.version)
            await model.aclose()
            return service

    service = asyncio.run(main())
    assert service.bodies == [
        {"use_activation": False, "model": "rm", "messages": [{"role": "assistant", "content": "worth -1.5"}]}
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"data": [{"probs": [0.2, 0.8]}]}, "2 numbers instead of one score"),
        ({"data": [{"probs": [None]}]}, "None instead of one score"),
        ({"data": []}, "no data"),
        ({}, "no data"),
    ],
)
def test_an_answer_without_exactly_one_number_raises_fatal(answer: Any, said: str) -> None:
    async def main() -> None:
        async with Service(Plan(answer=lambda path, body: (200, answer))) as service:
            with pytest.raises(Fatal, match=said):
                await PoolingServer(service.url, "rm")(asked(0))

    asyncio.run(main())
    with pytest.raises(UserError, match="classify or pooling"):
        PoolingServer("http://localhost:1", "rm", endpoint="score")  # type: ignore[arg-type]


@pytest.mark.parametrize("joined", [False, True])
def test_evaluation_does_not_delay_training(folder: str, joined: bool) -> None:
    """With ``joined``, three of the training requests are identical to evaluation requests that already wait."""
    model = RewardModel(folder, tokens_per_batch=1)  # so each batch holds one conversation
    entered, go = threading.Event(), threading.Event()
    forward = model._forward

    def held(rows: list[list[int]]) -> torch.Tensor:
        entered.set()
        assert go.wait(30)
        return forward(rows)

    model._forward = held  # type: ignore[method-assign]
    order: list[str] = []

    async def main() -> None:
        async with RewardAgent(model) as agent:

            async def one(lane: Any, index: int, says: str) -> None:
                await agent.lane(lane).score(Task("t"), asked(index).messages)
                order.append(says)

            evaluation = [asyncio.create_task(one("eval", n, "eval")) for n in range(30)]
            await asyncio.to_thread(entered.wait, 30)
            training = [asyncio.create_task(one("train", n, "train")) for n in range(27 if joined else 30, 33)]
            await asyncio.sleep(0.1)
            go.set()
            await asyncio.gather(*evaluation, *training)

    asyncio.run(main())
    assert order.count("train") == (6 if joined else 3)
    last = max(index for index, lane in enumerate(order) if lane == "train")
    assert last < 14
