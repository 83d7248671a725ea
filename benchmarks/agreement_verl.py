"""The rows of `agreement.py` that compare with verl: calls of verl's functions, and the intentional differences."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agreement_cases import (
    DUAL,
    HIGH,
    LOW,
    MODES,
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
from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import LossConfig, Tokens, aggregate, kl_penalty, precompute, value_loss
from gleanrl.learners.torch import KlCoefficient

NORM = "seq-mean-token-sum-norm"
PEER_LOSS = {"ppo": "vanilla"}  # verl's names of losses; losses not listed here have the same name in both libraries


class Verl:
    name = "verl"

    def __init__(self) -> None:
        from omegaconf import OmegaConf
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig
        from verl.workers.config.actor import PolicyLossConfig

        self.version = importlib.metadata.version("verl")
        self.core, self.correction = core_algos, rollout_corr_helper
        self.algorithm = OmegaConf.create({"gamma": 0.9, "norm_adv_by_std_in_grpo": True})
        self.actor = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=LOW,
            clip_ratio_high=HIGH,
            clip_ratio_c=DUAL,
            policy_loss=PolicyLossConfig(clip_cov_ratio=1.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7),
        )
        _, returns = self.advantages("reinforce_plus_plus", [[0.0, 0.0, 1.0]], [[1, 0, 1]])
        # Whether a reward after an untrained token reaches the tokens before it; in verl this is so since 0.9.0.
        self.returns_pass_holes = bool(returns[0, 0] > 0)

    def advantages(
        self, name: str, rewards: Any, mask: Any, group: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rewards = torch.as_tensor(rewards)
        group = np.zeros(len(rewards), np.int64) if group is None else np.asarray(group)
        mask = torch.as_tensor(mask).to(rewards.dtype)
        if name != "gae":
            options |= {"index": group, "config": self.algorithm}
        function = self.core.get_adv_estimator_fn(name)
        if options.pop("plain", False):
            options["norm_adv_by_std_in_grpo"] = False
        return function(token_level_rewards=rewards.clone(), response_mask=mask, **options)

    def loss(
        self, name: str, case: Case, logp: Tensor, mode: str | None = None, weights: Tensor | None = None
    ) -> Tensor:
        function = self.core.get_policy_loss_fn(name)
        return function(
            old_log_prob=case.old,
            log_prob=logp,
            advantages=case.advantages,
            response_mask=case.weights,
            loss_agg_mode=mode or case.mode,
            config=self.actor,
            rollout_is_weights=weights,
        )[0]

    # --- rows of the first table
    def checks(self) -> list[Check]:
        return [*self.estimator_checks(), *self.loss_checks(), *self.correction_checks(), *self.other_checks()]

    def estimator_checks(self) -> list[Check]:
        def row(name: str, theirs: str = "", plain: bool = False, **fields: Any) -> Check:
            def compare(case: Case) -> dict[str, Pair]:
                given, told = {}, {}
                if name == "gae":
                    given = told = {"values": case.values, "gamma": 0.9, "lam": 0.8}
                elif name == "remax":
                    given = told = {"reward_baselines": case.greedy}
                elif name.startswith("reinforce_plus_plus") and not name.endswith("baseline"):
                    given = {"gamma": 0.9, "across_turns": self.returns_pass_holes}
                result = self.advantages(theirs or name, case.rewards, case.mask, case.group, plain=plain, **told)
                ours, peers = credits(case, name, **given), torch.stack(result)
                mask = case.mask.expand_as(ours)
                return {"values": (ours[mask], peers[mask])}

            label = name
            if name == "reinforce_plus_plus" and not self.returns_pass_holes:
                label += " (across_turns = false)"
            return Check(label, theirs + (" without std" if plain else "") if theirs else name, compare, **fields)

        return [
            row("grpo"),
            row("grpo", "grpo_vectorized"),
            row("dr_grpo", "grpo", plain=True),
            row("grpo_passk", group=(2, 16)),
            row("rloo"),
            row("rloo", "rloo_vectorized", group=(2, 16)),
            row("reinforce_plus_plus"),
            row("reinforce_plus_plus_baseline"),
            row("opo"),
            row("gpg"),
            row("remax"),
            row("gae"),
        ]

    def loss_checks(self) -> list[Check]:
        def row(name: str, theirs: str, drift: float = 25.0, **settings: Any) -> Check:
            return Check(
                name,
                f"{theirs} loss",
                lambda case: differentiated(
                    case,
                    lambda logp: our_loss(case, logp, name=name, **settings),
                    lambda logp: self.loss(theirs, case, logp),
                ),
                drift=drift,
            )

        return [
            row("ppo", "vanilla"),
            row("gspo", "gspo", drift=9.0),
            row("cispo", "cispo"),
            row("gpg", "gpg"),
            row("clip_cov", "clip_cov", drift=19.0, options={"share": 1.0}),
            row("kl_cov", "kl_cov", drift=19.0, options={"share": 0.2, "coefficient": 0.7}),
        ]

    def correction_checks(self) -> list[Check]:
        """Return the rows for importance corrections.

        Our loss includes the correction. In verl, a helper computes weights and a rejection mask, which are then passed
        to the loss.
        """

        def row(name: str, correction: str, level: str, peer: str, rejected: str | None = None) -> Check:
            settings = {"correction": correction, "correction_level": level, "correction_cap": 2.0}
            settings |= {"correction_floor": 0.5} if correction == "mask" else {}

            def theirs(case: Case, logp: Tensor) -> Tensor:
                drift = (logp.detach() if name == "reinforce" else case.old) - case.behaviour
                weights, _ = self.correction.compute_rollout_correction_weights(drift, case.weights, level, 2.0)
                mask = case.weights
                if rejected:
                    mask, _ = self.correction.compute_rollout_rejection_mask(drift, mask, rejected, "0.5_2.0")
                case = replace(case, mask=mask.bool())
                if name == "reinforce":
                    return self.core.compute_policy_loss_reinforce(
                        case.behaviour, logp, case.advantages, case.weights, case.mode, self.actor, weights
                    )[0]
                if not bool(mask.any()):
                    return 0 * logp.sum()  # verl's loss is NaN if all tokens are rejected; ours is 0
                return self.loss(PEER_LOSS.get(name, name), case, logp, weights=weights)

            return Check(
                f"{name}, correction {correction}, {level}",
                peer,
                lambda case: differentiated(
                    case, lambda logp: our_loss(case, logp, name=name, **settings), lambda logp: theirs(case, logp)
                ),
                drift=9.0,
            )

        return [
            row("ppo", "truncate", "token", "vanilla loss, rollout_is token"),
            row("ppo", "truncate", "sequence", "vanilla loss, rollout_is sequence"),
            row("ppo", "mask", "token", "vanilla loss, rollout_is token, rollout_rs token_k1", "token_k1"),
            row("ppo", "mask", "sequence", "vanilla loss, rollout_is sequence, rollout_rs seq_sum_k1", "seq_sum_k1"),
            row("gspo", "mask", "token", "gspo loss, rollout_is token, rollout_rs token_k1", "token_k1"),
            row("reinforce", "truncate", "token", "bypass mode's reinforce, rollout_is token"),
            Check("which tokens correction mask, geometric, keeps", "rollout_rs seq_mean_k1", self.kept, drift=19.0),
        ]

    def kept(self, case: Case) -> dict[str, Pair]:
        config = LossConfig(correction="mask", correction_level="geometric", correction_cap=2.0, correction_floor=0.5)
        m, drift = case.mask, 3 * (case.old - case.behaviour)
        nothing = torch.zeros_like(case.old[m])
        tokens = Tokens(nothing, nothing + drift[m], nothing, m.nonzero()[:, 0], nothing.bool(), nothing)
        weight = precompute(tokens, config).weight
        assert weight is not None
        mask, _ = self.correction.compute_rollout_rejection_mask(drift, case.weights, "seq_mean_k1", "0.5_2.0")
        return {"values": ((weight > 0).to(mask.dtype), mask[m])}

    def other_checks(self) -> list[Check]:
        def aggregation(mode: str) -> Check:
            def per_token(logp: Tensor, case: Case) -> Tensor:
                return case.advantages * logp

            return Check(
                mode,
                f"agg_loss {mode}",
                lambda case: differentiated(
                    case,
                    lambda logp: aggregate(per_token(logp, case), case.mask, mode),
                    lambda logp: self.core.agg_loss(per_token(logp, case), case.weights, mode),
                ),
            )

        def kl(kind: str) -> Check:
            return Check(
                f"kl_penalty {kind}",
                f"kl_penalty {kind}",
                lambda case: differentiated(
                    case,
                    lambda logp: kl_penalty(logp, case.old, kind),
                    lambda logp: self.core.kl_penalty(logp, case.old, kind),
                ),
            )

        def critic(case: Case) -> dict[str, Pair]:
            old, returns = case.values, case.ref
            return differentiated(
                case,
                lambda new: value_loss(new[case.mask], old[case.mask], returns[case.mask], 0.5).mean(),
                lambda new: self.core.compute_value_loss(new, returns, old, case.weights, 0.5)[0],
            )

        kinds = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
        return [
            *map(aggregation, MODES),
            *map(kl, kinds),
            Check("value_loss", "compute_value_loss", critic),
            Check("kl_target, the next coefficient", "AdaptiveKLController", self.next_coefficient),
        ]

    def next_coefficient(self, case: Case) -> dict[str, Pair]:
        target, measured, trajectories = 0.05, float(case.values[0, 0].abs()), len(case.group)
        ours = KlCoefficient(LossConfig(kl_coefficient=0.1, kl_target=target, kl_horizon=100.0))
        ours.adapt(measured, trajectories)
        theirs = self.core.AdaptiveKLController(0.1, target, 100.0)
        theirs.update(measured, trajectories)
        return {"values": (torch.tensor(ours.value), torch.tensor(theirs.value))}

    # --- rows of the second table: intentional differences
    def differences(self) -> list[Difference]:
        return [*self.estimator_differences(), *self.loss_differences()]

    def estimator_differences(self) -> list[Difference]:
        def both(
            about: str, name: str, theirs: str, rewards: Any, mask: Any, *, at: int = 0, **options: Any
        ) -> Difference:
            """Compare the advantages (``at`` = 0) or the returns (``at`` = 1) of the first trajectory."""
            told = dict(options)
            if name == "reinforce_plus_plus":
                told, options = {}, {"gamma": 0.9, **options}  # verl reads gamma from its configuration instead
            rewards, mask = torch.tensor(rewards), torch.tensor(mask)
            ours = estimate(name, rewards, mask, torch.zeros(len(rewards), dtype=torch.int64), **options)[at][0]
            try:
                peer = shown(self.advantages(theirs, rewards, mask, **told)[at][0])
            except ValueError as error:
                peer = f"ValueError: {error}"
            return Difference(about, shown(ours), peer)

        equal = max(range(2, 17), key=self.noise)
        alike = [[0.7]] * equal
        values, stray = torch.zeros(1, 3), ([[0.0, 0.0, 1.0]], [[1, 1, 0]])
        hole = ([[0.0, 0.0, 1.0]], [[1, 0, 1]])
        plain = {"gamma": 1.0, "lam": 1.0, "values": values}
        return [
            both(f"grpo, {equal} equal rewards of 0.7", "grpo", "grpo", alike, [[1]] * equal),
            both(
                "rloo of a single rollout, reward 0.5; verl's rloo_vectorized",
                "rloo",
                "rloo_vectorized",
                [[0.5]],
                [[1]],
            ),
            both(
                "reinforce_plus_plus, one trained token", "reinforce_plus_plus", "reinforce_plus_plus", [[1.0]], [[1]]
            ),
            both(
                "reinforce_plus_plus returns, mask 1 0 1, reward 1 at the end",
                "reinforce_plus_plus",
                "reinforce_plus_plus",
                *hole,
                at=1,
            ),
            both(
                "the same with across_turns = false, verl before 0.9",
                "reinforce_plus_plus",
                "reinforce_plus_plus",
                *hole,
                at=1,
                across_turns=False,
            ),
            both(
                "reinforce_plus_plus returns, mask 1 1 0, reward 1 at the masked end",
                "reinforce_plus_plus",
                "reinforce_plus_plus",
                *stray,
                at=1,
            ),
            both("gae returns, the same", "gae", "gae", *stray, at=1, **plain),
            both("remax returns, the same", "remax", "remax", *stray, at=1, reward_baselines=torch.zeros(1)),
        ]

    def noise(self, size: int) -> float:
        """Return the largest absolute advantage that verl computes for ``size`` equal rewards; exact would be 0."""
        return float(self.advantages("grpo", torch.full((size, 1), 0.7), torch.ones(size, 1))[0].abs().max())

    def loss_differences(self) -> list[Difference]:
        def loss(about: str, name: str, theirs: str, drift: float, advantage: float) -> Difference:
            case = single(drift, advantage)
            found = differentiated(
                case,
                lambda logp: our_loss(case, logp, name=name, aggregation="token-mean"),
                lambda logp: self.loss(theirs, case, logp, "token-mean"),
            )
            texts = [f"{shown(found['values'][i])}, gradient {shown(found['gradient'][i])}" for i in (0, 1)]
            return Difference(about, *texts)

        def aggregated(about: str, values: Tensor, mask: Tensor, mode: str) -> Difference:
            return Difference(
                about, shown(aggregate(values, mask, mode)), shown(self.core.agg_loss(values, mask, mode))
            )

        holed, mask = torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, 0.0]])
        return [
            loss("gspo, log-ratio 12, advantage -1", "gspo", "gspo", 12.0, -1.0),
            loss("kl_cov, log-ratio 25, advantage -1", "kl_cov", "kl_cov", 25.0, -1.0),
            aggregated("seq-mean-token-mean with NaN at a masked position", holed, mask, "seq-mean-token-mean"),
            aggregated("token-mean where nothing is trained", torch.zeros(1, 2), torch.zeros(1, 2), "token-mean"),
            self.icepop(),
            self.weighted_gpg(),
            self.clip_cov_draws(),
        ]

    def icepop(self) -> Difference:
        """Compare ppo on two tokens with weights 1 and 3, where weights outside [0.5, 2] are masked.

        In verl only the weights (rollout_is) are used, without the rejection mask.
        """
        case = replace(single(0.0, 1.0), behaviour=torch.tensor([[-1.0, -1.0 - float(np.log(3))]]))
        ours = our_loss(case, case.logp, correction="mask", correction_cap=2.0, correction_floor=0.5)
        weights, _ = self.correction.compute_rollout_correction_weights(
            case.old - case.behaviour, case.weights, "token", "0.5_2.0"
        )
        theirs = self.loss("vanilla", case, case.logp, weights=weights)
        return Difference(
            "ppo, correction mask: mean over two tokens, one of them left out", shown(ours), shown(theirs)
        )

    def weighted_gpg(self) -> Difference:
        """Compare gpg with truncated weights where the policy has changed since ``old_logp``.

        The behaviour policy equals the old policy, so verl's weights are 1, while ours include the change.
        """
        case = single(float(np.log(2)), 1.0)
        ours = our_loss(case, case.logp, name="gpg", correction="truncate", correction_cap=5.0)
        weights, _ = self.correction.compute_rollout_correction_weights(
            case.old - case.behaviour, case.weights, "token", 5.0
        )
        theirs = self.loss("gpg", case, case.logp, weights=weights)
        return Difference("gpg, correction truncate, the probability doubled since", shown(ours), shown(theirs))

    def clip_cov_draws(self) -> Difference:
        """Count the different losses that one batch has with eight states of torch's global random generator."""
        random = torch.Generator().manual_seed(0)
        old, advantages = (torch.randn(8, 64, generator=random) for _ in range(2))
        case = replace(single(0.0, 1.0), old=old, logp=old, advantages=advantages, behaviour=old)
        case = replace(case, mask=torch.ones(8, 64, dtype=torch.bool))
        actor = replace(self.actor, policy_loss=replace(self.actor.policy_loss, clip_cov_ratio=0.01))
        ours, theirs = set(), set()
        for state in range(8):
            torch.manual_seed(state)
            ours.add(float(our_loss(case, old, name="clip_cov", options={"share": 0.01})))
            theirs.add(
                float(self.core.get_policy_loss_fn("clip_cov")(old, old, advantages, case.weights, config=actor)[0])
            )
        return Difference(
            "clip_cov: different losses of one batch under 8 states of the generator", str(len(ours)), str(len(theirs))
        )
