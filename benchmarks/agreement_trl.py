"""The rows of `agreement.py` that compare with TRL.

They call the methods of a `GRPOTrainer` that compute advantages, importance ratios and losses. Sampling, reward
functions and forward passes of the trainer are replaced by the values of the batch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agreement_cases import (
    DUAL,
    HIGH,
    LOW,
    Case,
    Check,
    Difference,
    Pair,
    credits,
    differentiated,
    our_loss,
    shown,
    single,
)
from gleanrl.algorithms.loss import kl_penalty

BETA, CAP, FLOOR = 0.3, 2.0, 0.5
BATCHES: dict[str, Any] = {"drift": 19.0, "group": (2, 16), "equal": True}


class Trl:
    name = "TRL"

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        self.trainer: Any = make_trainer()
        self.version = importlib.metadata.version("trl")

    @contextlib.contextmanager
    def configured(self, **settings: Any) -> Iterator[Any]:
        """Yield the trainer with changed attributes, which are restored when the block ends."""
        usual = {name: getattr(self.trainer, name) for name in settings}
        for name, value in settings.items():
            setattr(self.trainer, name, value)
        yield self.trainer
        for name, value in usual.items():
            setattr(self.trainer, name, value)

    def scored(self, case: Case, **settings: Any) -> dict[str, Any]:
        """Return the inputs of the loss, advantages included, that the trainer makes of a batch after sampling."""
        members = int((case.group == 0).sum())
        with self.configured(num_generations=members, given=case, **settings) as trainer:
            return trainer._generate_and_score_completions([{"prompt": "a"}] * len(case.group))

    def advantages(self, case: Case, scale_rewards: str) -> Tensor:
        return self.scored(case, scale_rewards=scale_rewards)["advantages"][:, None] * case.weights

    def loss(
        self,
        case: Case,
        logp: Tensor,
        loss_type: str,
        delta: float | None = None,
        unbiased: bool = False,
        **settings: Any,
    ) -> Tensor:
        """Return the trainer's loss if the policy's log-probs are ``logp``, with the advantages of ``case``."""
        settings = {"epsilon_low": LOW, "epsilon_high": HIGH, "loss_type": loss_type, **settings}
        inputs = self.scored(case, **settings)
        inputs |= {"advantages": case.advantages, "old_per_token_logps": case.old, "ref_per_token_logps": case.ref}
        length = {"max_completion_length": case.mask.shape[1]}
        with self.configured(given=replace(case, logp=logp), **length, **settings) as trainer:
            trainer.args.delta, trainer.args.use_bias_correction_kl = delta, unbiased
            return trainer._compute_loss(trainer.model, inputs)

    # --- rows of the first table
    def checks(self) -> list[Check]:
        cispo = {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}
        sequences = {"aggregation": "seq-mean-token-mean"}
        return [
            self.advantage_row("dr_grpo", "none"),
            self.row("ppo, token-mean", "dapo loss", {}, {"loss_type": "dapo"}),
            self.row("ppo, token-mean", "bnpo loss", {}, {"loss_type": "bnpo"}),
            self.row("ppo, seq-mean-token-mean", "grpo loss", sequences, {"loss_type": "grpo"}),
            Check(
                "ppo, seq-mean-token-sum-norm",
                "dr_grpo loss",
                self.dr_grpo,
                **BATCHES,
            ),
            self.row("ppo, dual_clip", "dapo loss, delta", {"dual_clip": DUAL}, {"loss_type": "dapo", "delta": DUAL}),
            self.row("ppo + kl k3", "dapo loss, beta", {}, {"loss_type": "dapo", "beta": BETA}, kl="k3"),
            self.row(
                "ppo + kl k3+, on policy",
                "dapo loss, beta, use_bias_correction_kl",
                {},
                {"loss_type": "dapo", "beta": BETA, "unbiased": True},
                kl="k3+",
            ),
            self.row(
                "gspo",
                'grpo loss, importance_sampling_level = "sequence"',
                {"name": "gspo", **sequences},
                {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            ),
            self.row(
                "cispo, clip_low = 1, clip_high = 4",
                "cispo loss, epsilon_high = 5",
                cispo,
                {"loss_type": "cispo", "epsilon_high": 5.0},
            ),
            self.corrected("truncate", "token"),
            self.corrected("truncate", "sequence"),
        ]

    def advantage_row(self, name: str, scale: str) -> Check:
        def compare(case: Case) -> dict[str, Pair]:
            case = replace(case, rewards=case.rewards.float().to(case.rewards.dtype))
            return {"values": (credits(case, name)[0], self.advantages(case, scale))}

        return Check(name, f'advantages, scale_rewards = "{scale}"', compare, **BATCHES)

    def row(self, ours: str, theirs: str, settings: dict[str, Any], told: dict[str, Any], kl: str = "") -> Check:
        def compare(case: Case) -> dict[str, Pair]:
            if kl == "k3+":  # TRL multiplies this by the importance ratio, so both agree only where the ratio is 1
                case = replace(case, old=case.logp)
            if settings.get("name") == "gspo":  # TRL has one ratio per sequence, so a sequence needs a single advantage
                case = replace(case, advantages=case.advantages[:, :1].expand_as(case.logp))

            def our_side(logp: Tensor) -> Tensor:
                loss = our_loss(case, logp, **{"aggregation": "token-mean", "dual_clip": None, **settings})
                return loss + (BETA * kl_penalty(logp, case.ref, kl)[case.mask].mean() if kl else 0.0)

            return differentiated(case, our_side, lambda logp: self.loss(case, logp, **told))

        return Check(ours, theirs, compare, **BATCHES)

    def corrected(self, correction: str, level: str) -> Check:
        settings = {"correction": correction, "correction_level": level, "correction_cap": CAP}
        mode = f"{level}_{correction}"
        told = {
            "loss_type": "dapo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": CAP,
            "vllm_importance_sampling_clip_min": None,
        }
        return self.row(f"ppo, correction {correction}, {level}", f"dapo loss, {mode}", settings, told)

    def dr_grpo(self, case: Case) -> dict[str, Pair]:
        settings = {"aggregation": "seq-mean-token-sum-norm"}
        return differentiated(
            case,
            lambda logp: our_loss(case, logp, dual_clip=None, **settings),
            lambda logp: self.loss(case, logp, "dr_grpo"),
        )

    # --- rows of the second table: intentional differences
    def differences(self) -> list[Difference]:
        def loss(about: str, case: Case, settings: dict[str, Any], told: dict[str, Any]) -> Difference:
            ours = our_loss(case, case.logp, **{"aggregation": "token-mean", "dual_clip": None, **settings})
            return Difference(about, shown(ours), shown(self.loss(case, case.logp, **told).detach()))

        pair = replace(single(0.0, 1.0), rewards=torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
        pair = replace(pair, mask=torch.ones(2, 2, dtype=torch.bool), group=torch.zeros(2, dtype=torch.int64))
        empty = replace(stacked(single(0.0, 1.0), 2), mask=torch.tensor([[True, True], [False, False]]))
        far, off = replace(single(0.0, 1.0), ref=torch.full((1, 2), 4.0)), single(0.0, 1.0)
        off = replace(off, behaviour=torch.tensor([[-1.0, -1.0 - torch.log(torch.tensor(3.0)).item()]]))
        masking = {
            "loss_type": "dapo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": CAP,
            "vllm_importance_sampling_clip_min": FLOOR,
        }
        with_kl = self.loss(far, far.logp, loss_type="dapo", beta=1.0) - self.loss(far, far.logp, loss_type="dapo")
        upper = {"loss_type": "cispo", "epsilon_high": 1 + HIGH}
        return [
            Difference(
                "grpo advantage of the better of two, rewards 0 and 1",
                shown(credits(pair, "grpo")[0][1, 0]),
                shown(self.advantages(pair, "group")[1, 0]),
            ),
            Difference("kl k3, d = -5", shown(kl_penalty(far.logp, far.ref, "k3")[0, 0]), shown(with_kl)),
            loss("ppo, log-ratio 25, advantage -1", single(25.0, -1.0), {}, {"loss_type": "dapo"}),
            loss(
                "cispo, log-ratio -2, advantage 1",
                single(-2.0, 1.0),
                {"name": "cispo"},
                upper,
            ),
            loss(
                "seq-mean-token-mean of a sequence and an empty one",
                empty,
                {"aggregation": "seq-mean-token-mean"},
                {"loss_type": "grpo"},
            ),
            loss(
                "ppo, correction mask: mean over two tokens, one of them left out",
                off,
                {"correction": "mask", "correction_cap": CAP, "correction_floor": FLOOR},
                masking,
            ),
        ]


def stacked(case: Case, times: int) -> Case:
    """Return a batch whose only group consists of ``times`` copies of the trajectory in ``case``."""
    fields = {name: value.repeat(times, 1) for name, value in vars(case).items() if getattr(value, "ndim", 0) == 2}
    return replace(case, **fields, group=torch.zeros(times, dtype=torch.int64), greedy=torch.zeros(times))


def make_trainer() -> Any:
    """Make a trainer that uses the batch in its attribute ``given`` (a `Case`) instead of sampling.

    Token ids, masks, log-probs and rewards come from ``given``. The trainer's tiny model is never called.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Given(GRPOTrainer):
        given: Case

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            rows, length = self.given.mask.shape
            tokens, texts = [[2] * length for _ in range(rows)], ["a"] * rows
            mask, sampled = self.given.mask.long().tolist(), self.given.behaviour.tolist()
            return [[2] for _ in range(rows)], tokens, mask, texts, sampled, {}, None, None

        def _get_per_token_logps_and_entropies(self, *_: Any, **wanted: Any) -> tuple[Any, Any, None]:
            logp = self.given.logp if wanted.get("compute_entropy") else self.given.old
            return logp, torch.zeros_like(logp), None

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return self.given.rewards.sum(-1, keepdim=True).float()

    logging.disable(logging.WARNING)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, **sizes))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = GRPOConfig(
            folder, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2, num_generations=2
        )
        trainer = Given(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
            args=settings,
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.ref_model = model
    trainer.given = single(0.0, 0.0)
    return trainer
