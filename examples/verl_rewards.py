"""The reward agent as verl's custom reward function, with one agent in each of verl's processes.

    pip install 'gleanrl[rewards]' ray tensordict hydra-core codetiming torchdata orjson aiohttp
    pip install --no-deps verl==0.9.1
    python examples/verl_rewards.py

In a verl run, select this file as the custom reward function:

    reward.custom_reward_function.path=examples/verl_rewards.py
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.url=http://grader:8080/score

Prefer `compute_score_async`. verl calls the synchronous `compute_score` from a few threads, so only a few requests are
sent at the same time; with the async function, all requests of a batch are. Both return ``{"score", "scored"}``.

verl has no representation of a missing reward. If the agent cannot get one after all attempts, the option ``missing``
decides. With "stop" (the default), an error ends the run. With "nan", the score is NaN, and a subclass of verl's
trainer must call `neutral` on its batch before advantages are computed. A missing reward never becomes 0.

Run as a script, this file starts a slow judge in this process and scores a batch with verl's reward manager, once with
each function. If verl is not installed, it makes the same calls from threads.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch

from gleanrl import Score, Task
from gleanrl.rewards import BlockingRewardAgent
from gleanrl.rewards.http import HttpReward
from gleanrl.utils.errors import UserError

Missing = Literal["stop", "nan"]

_agents: dict[str, BlockingRewardAgent] = {}
_opening = threading.Lock()


def agent_for(url: str, **settings: Any) -> BlockingRewardAgent:
    """Return this process's agent for the service at ``url``, made by the first call and closed at process exit."""
    with _opening:
        if url not in _agents:
            _agents[url] = BlockingRewardAgent(HttpReward(url), **settings)
        return _agents[url]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str,
    missing: Missing = "stop",
    **settings: Any,
) -> dict[str, float]:
    """Score one response; a custom reward function of verl. Blocks until the score is there.

    verl passes ``reward_kwargs`` as ``url``, ``missing`` and further settings of the reward agent.
    """
    submitted = _submit(agent_for(url, **settings), data_source, solution_str, ground_truth, extra_info)
    return _result(submitted.result(), missing)


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str,
    missing: Missing = "stop",
    **settings: Any,
) -> dict[str, float]:
    """Like `compute_score`, but async, so that verl awaits the scores of a whole batch at the same time."""
    submitted = _submit(agent_for(url, **settings), data_source, solution_str, ground_truth, extra_info)
    return _result(await asyncio.wrap_future(submitted), missing)


def _submit(
    agent: BlockingRewardAgent, source: str, response: str, truth: Any, extra_info: Mapping[str, Any] | None
) -> Future[Score]:
    extra = dict(extra_info or {})
    task = Task(f"{source}/{extra.get('index', truth)}", payload={"answer": truth, "extra_info": extra})
    return agent.submit(task, response)


def _result(score: Score, missing: Missing) -> dict[str, float]:
    if not score.valid and missing == "stop":
        raise UserError(f"a response has no score: {score.explanation}")
    return {"score": score.value if score.valid else math.nan, "scored": float(score.valid)}


def neutral(batch: Any) -> int:
    """Exclude responses without a score (NaN) from the update, and return how many there are.

    Such a response gets the mean score of the scored responses to its prompt, so that its advantage is 0 and the mean
    of its group does not change. Its mask is set to 0, so that its tokens are not trained. A limitation: if advantages
    are divided by the standard deviation of a group, that deviation includes these responses.

    Args:
        batch: a `DataProto` with ``token_level_scores`` and ``response_mask``, which are modified in place, and with
            ``uid``, which is the same for all responses to a prompt.
    """
    scores, mask = batch.batch["token_level_scores"], batch.batch["response_mask"]
    totals = scores.sum(-1)
    missing = totals.isnan()
    _, prompts = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    prompt_of = torch.from_numpy(prompts).to(totals.device)
    for row in missing.nonzero()[:, 0].tolist():
        mean = totals[prompt_of == prompt_of[row]].nanmean()
        scores[row] = 0.0
        # The mean is NaN if no response to the prompt has a score. Then all are masked, and the value has no effect.
        scores[row, int(mask[row].sum()) - 1] = mean.nan_to_num(0.0)
    mask[missing] = 0
    return int(missing.sum())


# --- a demonstration ----------------------------------------------------------------------------
def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return arguments of `compute_score` for ``args.members`` responses to each prompt, about half of them correct."""
    from words import word_tasks

    draw = random.Random(args.seed)
    found = []
    for index, task in enumerate(word_tasks(args.prompts, length=4, seed=args.seed)):
        answer = task.payload["word"][::-1]
        for member in range(args.members):
            said = answer if draw.random() < 0.5 else f"{answer}{'abcdefghij'[member % 10]}"
            info = {"index": f"{index}.{member}"}
            found.append({"data_source": "backward", "solution_str": said, "ground_truth": answer, "extra_info": info})
    return found


def by_verl(rows: Sequence[Mapping[str, Any]], name: str, options: Mapping[str, Any]) -> tuple[list[float], float]:
    """Score ``rows`` with verl's reward manager, constructed and called as in a run of verl.

    ``name`` is the name of the reward function in this file. Returns the scores and the seconds that it took.
    """
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from verl import DataProto  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo.reward import load_reward_manager  # pyright: ignore[reportMissingImports]

    from gleanrl.learners.tiny import build_tokenizer

    tokenizer = build_tokenizer([row["solution_str"] for row in rows], vocabulary=256)
    function = {"path": __file__, "name": name, "reward_kwargs": dict(options)}
    config = OmegaConf.create(
        {"reward": {"custom_reward_function": function, "reward_manager": {"source": "register", "name": "naive"}}}
    )
    encoded = tokenizer([row["solution_str"] for row in rows], padding=True, padding_side="right", return_tensors="pt")
    responses, mask = torch.as_tensor(encoded["input_ids"]), torch.as_tensor(encoded["attention_mask"])
    columns = {
        "data_source": [row["data_source"] for row in rows],
        "reward_model": [{"ground_truth": row["ground_truth"]} for row in rows],
        "extra_info": [dict(row["extra_info"]) for row in rows],
    }
    batch = DataProto.from_dict(
        {"prompts": responses, "responses": responses, "attention_mask": torch.cat([mask, mask], 1)},
        non_tensors={key: np.array(values, object) for key, values in columns.items()},
    )

    async def scored() -> tuple[list[float], float]:
        manager = load_reward_manager(config, tokenizer)
        await manager.run_single(batch[:1])  # makes the agent, which shall not be part of the measured time
        started = time.perf_counter()
        told = await asyncio.gather(*(manager.run_single(batch[i : i + 1]) for i in range(len(batch))))
        return [each["reward_score"] for each in told], time.perf_counter() - started

    return asyncio.run(scored())


def by_threads(rows: Sequence[Mapping[str, Any]], name: str, options: Mapping[str, Any]) -> tuple[list[float], float]:
    """Do the same as `by_verl` without verl.

    The synchronous function is called from 6 threads, as many as verl uses on two cores; the async function is called
    for all rows at the same time.
    """

    async def scored() -> list[dict[str, float]]:
        return await asyncio.gather(*(compute_score_async(**row, **options) for row in rows))

    compute_score(**rows[0], **options)  # makes the agent, which shall not be part of the measured time
    started = time.perf_counter()
    if name == "compute_score":
        with ThreadPoolExecutor(6) as threads:
            told = list(threads.map(lambda row: compute_score(**row, **options), rows))
    else:
        told = asyncio.run(scored())
    return [each["score"] for each in told], time.perf_counter() - started


def main() -> None:
    from judge_service import judge

    parser = argparse.ArgumentParser(description="the reward agent behind verl's compute_score")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--members", type=int, default=4, help="responses a prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = importlib.util.find_spec("verl") is not None
    for name in ("compute_score", "compute_score_async"):
        with judge() as service:
            options = {"url": service.url, "missing": "nan"}
            scores, seconds = (by_verl if found else by_threads)(rows(args), name, options)
            missing = sum(math.isnan(score) for score in scores)
            print(
                f"{'verl' if found else 'threads'}, {name}: {len(scores)} responses in {seconds:.1f} s, "
                f"{service.most} at once, success {np.nanmean(scores):.2f}, {missing} not scored"
            )


if __name__ == "__main__":
    main()
