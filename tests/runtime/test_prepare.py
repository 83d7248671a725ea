"""Tests of ``prepare``, ``demonstrate`` and ``measure_baselines``: the model, tasks and baselines of a run's start.

The warm start and the demonstrations are cached by everything that they depend on.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gleanrl.config.loading import load
from gleanrl.config.settings import Config, EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.agent.taskset import AgentTaskset
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.runtime.evaluation import measure_baselines
from gleanrl.runtime.prepare import (
    check_model,
    check_parts,
    demonstrate,
    prepare,
    supervised_examples,
    warm_start,
)
from gleanrl.tracking.monitors import Silent
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.importing import file_versions, load_object

SMALL = [
    ("environment.train_tasks", "6"),
    ("environment.eval_tasks", "6"),
    ("environment.warm_start_tasks", "8"),
    ("model.hidden_size", "32"),
    ("model.layers", "1"),
    ("model.heads", "2"),
    ("model.kv_heads", "1"),
    ("warm_start.demonstrations", "12"),
    ("warm_start.steps", "3"),
    ("warm_start.batch", "4"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLEANRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small(*overrides: tuple[str, str]) -> Config:
    return load("quickstart", [*SMALL, *overrides])


class Recorder(Silent):
    """Keeps the lines that it is told to print."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel": "2"}, "tensor_parallel = 2 does not divide the 3 ranks"),
        ({"tensor_parallel": "3"}, "tensor_parallel = 3 does not divide the model's num_attention_heads = 2"),
        ({"backend": "megatron", "pipeline_parallel": "2"}, "1 x 2 does not divide the 3 ranks"),
        (
            {"backend": "megatron", "pipeline_parallel": "3"},
            "3 does not divide the model's 1 layer",
        ),
        ({"backend": "megatron", "lora_rank": "2"}, "it trains no adapters"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_a_layout_that_the_model_does_not_fit_is_refused_before_anything_is_made(
    cache: Path, tmp_path: Path, settings: dict[str, str], why: str, given: bool
) -> None:
    made = small(*((f"learner.{key}", value) for key, value in settings.items()))
    if given:
        init = tmp_path / "a config without weights"
        build_model(made.model, build_tokenizer(["a text"], 512), 0).config.save_pretrained(init)
        made = made.model_copy(update={"model": made.model.model_copy(update={"init": str(init)})})
    with pytest.raises(UserError, match=why):
        prepare(made, Silent(), ranks=3)
    assert not cache.exists()


def test_the_memory_of_this_process_is_no_limit_for_a_model_that_several_ranks_share(tmp_path: Path) -> None:
    """Under torchrun the setting ``learner.ranks`` stays 1."""
    given = prepare(small(), Silent())
    given.model.save_pretrained(tmp_path / "model")
    given.tokenizer.save_pretrained(tmp_path / "model")
    config = small(("model.init", str(tmp_path / "model")))
    with patch("gleanrl.runtime.memory.available_memory", lambda: 1 << 10):
        prepare(config, Silent(), ranks=2)
        with pytest.raises(UserError, match=r"needs .* of memory .*, but 1\.0 KiB are available"):
            prepare(config, Silent())


@pytest.mark.parametrize(("dtype", "slow", "lines"), [("bfloat16", True, 1), ("bfloat16", False, 0), ("auto", True, 0)])
def test_a_run_says_that_this_processor_is_slow_in_bfloat16(dtype: str, slow: bool, lines: int) -> None:
    progress = Recorder()
    with patch("gleanrl.runtime.prepare.bfloat16_is_slow", lambda: slow):
        check_model(small(("model.dtype", dtype)), progress)
    assert ["bfloat16" in line for line in progress.lines] == [True] * lines


def test_the_second_prepare_loads_everything_from_the_cache_bit_for_bit(cache: Path) -> None:
    first = prepare(small(), Silent())
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    second = prepare(small(), Silent())
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == files
    assert all(torch.equal(a, b) for a, b in zip(weights(first.model), weights(second.model), strict=True))
    assert [t.id for t in first.train] == [t.id for t in second.train]
    assert first.demonstrations == second.demonstrations


@pytest.mark.parametrize("change", [("run.seed", "4"), ("warm_start.lr", "1e-4"), ("model.mlp_ratio", "2")])
def test_the_cached_model_depends_on_seed_warm_start_and_architecture(change: tuple[str, str]) -> None:
    before, after = prepare(small(), Silent()), prepare(small(change), Silent())
    a, b = weights(before.model), weights(after.model)
    assert any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_cached_model_depends_on_the_weights_that_a_directory_holds(tmp_path: Path) -> None:
    given, trained = prepare(small(), Silent()), []
    for _ in range(2):
        given.model.save_pretrained(tmp_path / "model")
        given.tokenizer.save_pretrained(tmp_path / "model")
        trained.append(prepare(small(("model.init", str(tmp_path / "model"))), Silent()).model)
        torch.nn.init.normal_(given.model.get_input_embeddings().weight)
    assert not torch.equal(*(model.get_input_embeddings().weight for model in trained))


def test_demonstrations_have_the_options_of_the_chat_template(tmp_path: Path) -> None:
    """The cached model depends on them, and an option that the template does not use is refused before anything."""
    given, trained = prepare(small(), Silent()), []
    given.model.save_pretrained(tmp_path / "model")
    given.tokenizer.chat_template = (
        "{% if mode %}<|system|>{{ mode }}<|end|>{% endif %}" + given.tokenizer.chat_template
    )
    given.tokenizer.save_pretrained(tmp_path / "model")
    for mode in ("go", "take", "go"):
        config = small(("model.init", str(tmp_path / "model")), ("context.template_options.mode", mode))
        made = prepare(config, Silent())
        trained.append(made.model.get_input_embeddings().weight)
        tokens, mask, _ = supervised_examples(config, made.tokenizer, made.demonstrations)[0]
        assert made.tokenizer.decode(tokens).startswith(f"<|system|>{mode}<|end|>")
        assert not mask[:3].any()
    assert torch.equal(trained[0], trained[2])
    assert not torch.equal(trained[0], trained[1])
    for make in (prepare, check_parts):
        with pytest.raises(UserError, match=r"context\.template_options\.mood.*mode"):
            make(small(("model.init", str(tmp_path / "model")), ("context.template_options.mood", "go")), Silent())
    with pytest.raises(UserError, match=r"context\.template_options"):
        small(("context.template_options.mode", "go"))  # the tiny model's template has no such option


def test_a_damaged_cache_entry_is_made_again(cache: Path) -> None:
    first = prepare(small(), Silent())
    (damaged,) = (cache / "warm-start").glob("*/model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:100])
    second = prepare(small(), Silent())
    assert all(torch.equal(a, b) for a, b in zip(weights(first.model), weights(second.model), strict=True))


@pytest.mark.parametrize("damage", ["", "[[1, 2, 3]]", "[[[], []]]", "7"])
def test_damaged_demonstrations_are_made_again(cache: Path, damage: str) -> None:
    first = prepare(small(), Silent())
    (damaged,) = (cache / "demonstrations").glob("*.json")
    damaged.write_text(damage)
    assert prepare(small(), Silent()).demonstrations == first.demonstrations


def test_the_three_splits_share_no_task() -> None:
    config = small()
    prepared = prepare(config, Silent())
    own = {t.id for t in prepared.taskset.tasks("warm_start", config.environment.warm_start_tasks)}
    assert own.isdisjoint({t.id for t in prepared.train} | {t.id for t in prepared.evaluation})
    assert {t.id for t in prepared.train}.isdisjoint({t.id for t in prepared.evaluation})


def test_the_tokenizer_has_the_environment_s_error_message_as_one_token() -> None:
    tokenizer = prepare(small(), Silent()).tokenizer
    assert len(tokenizer("Nothing happens.", add_special_tokens=False)["input_ids"]) == 1


EXPERT = """
class Adds:
    def add(self, a: int, b: int) -> int:
        \"""Adds two numbers.\"""
        return a + b
    def expert(self, answer):
        yield answer
"""


def test_demonstrations_are_made_again_when_the_environment_s_files_change(cache: Path, tmp_path: Path) -> None:
    code, rows = tmp_path / "adds.py", tmp_path / "rows.jsonl"
    code.write_text(EXPERT)
    options = f"{{environment_factory = '{code}:Adds', data = '{rows}'}}"
    config = small(("environment.name", "tools"), ("environment.options", options))

    def shown(more: int) -> list[str]:
        rows.write_text("".join(f'{{"prompt": "{i} + {more}?", "answer": "{i + more}"}}\n' for i in range(99)))
        found = demonstrate(config, load_taskset(config.environment, 0), Silent())
        return [str(one.conversations[0][0][0]["content"]).partition(" + ")[2] for one in found]

    assert set(shown(0)) == {"0?"}
    assert set(shown(1000)) == {"1000?"}
    assert len(list((cache / "demonstrations").iterdir())) == 2
    before = file_versions([config.environment.options])
    assert before == file_versions({"as": [load_object(f"{code}:Adds"), str(rows)]})
    code.write_text(EXPERT.replace("yield answer", "yield str(answer)"))
    after = file_versions([config.environment.options])
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
    assert file_versions(["gleanrl.rollout.renderer:Renderer", "json", "a" * 10_000, "\0", 3, None]) == []


def test_a_taskset_without_an_expert_or_with_too_few_tasks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from gleanrl.protocols import Taskset\n"
        "from gleanrl.types import Task\n"
        "class Mine(Taskset):\n"
        "    def __init__(self, most=10**6):\n        self.most = most\n"
        "    def tasks(self, split, count):\n"
        "        return [Task(f'{split}-{i}') for i in range(min(count, self.most))]\n"
        "    def environment(self, task):\n        return None\n"
    )
    config = small(("environment.name", f"{file}:Mine"), ("environment.options", "{}"))
    with pytest.raises(UserError, match=r"no expert.*warm_start\.enabled = false"):
        prepare(config, Silent())
    few = small(("environment.name", f"{file}:Mine"), ("environment.options", "{most = 3}"))
    with pytest.raises(UserError, match=r"has 3 train tasks, \d+ were asked for; lower environment\.train_tasks"):
        prepare(few, Silent())


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(Task(f'{split}-{i}') for i in range(count))", "a generator, not a list of tasks"),
        ("[f'{split}-{i}' for i in range(count)]", "'train-0' among the tasks, which is not a Task"),
        ("[Task('door', payload={'n': i}) for i in range(count)]", "the id 'door' to several tasks"),
        ("[Task(i) for i in range(count)]", "the id 0, but ids are texts"),
        ("[Task(f'{split}-{i}', 'Go!') for i in range(count)]", "the prompt of task 'train-0'"),
        ("[Task(f'{split}-{i}', ('Go!',)) for i in range(count)]", "the prompt of task 'train-0'"),
        (
            "[Task(f'{split}-{i}', ({'role': 'user', 'content': '\\ud800'},)) for i in range(count)]",
            "the prompt of task 'train-0'",
        ),
        ("None", "a NoneType, not a list of tasks"),
    ],
)
def test_anything_but_a_list_of_tasks_with_their_own_ids_is_refused(tmp_path: Path, returned: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from gleanrl.protocols import Taskset\n"
        "from gleanrl.types import Task\n"
        "class Mine(Taskset):\n"
        "    has_expert = True\n"
        f"    def tasks(self, split, count):\n        return {returned}\n"
        "    def environment(self, task):\n        return None\n"
    )
    config = small(("environment.name", f"{file}:Mine"), ("environment.options", "{}"))
    for make in (prepare, check_parts):
        with pytest.raises(UserError, match=re.escape(said) + rf".*\({file}:5\)$"):
            make(config, Silent())


def test_tasks_that_are_both_trained_and_evaluated_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from gleanrl.protocols import Taskset\n"
        "from gleanrl.types import Task\n"
        "class Mine(Taskset):\n"
        "    def tasks(self, split, count):\n"
        "        return [Task(f'p-{i}') for i in range(4 if split == 'eval' else 0, 4 + count)][:count]\n"
        "    def environment(self, task):\n        return None\n"
    )
    config = small(("environment.name", f"{file}:Mine"), ("environment.options", "{}"))
    with pytest.raises(UserError, match=r"training and evaluation share 2 of 6 evaluation tasks \('p-4' is one\)"):
        prepare(config, Silent())


EARNS = """
import json, urllib.request

def solve(task, base_url, api_key, model):
    def post(path, body):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    said = []
    for ask in (task["prompt"], "and now?"):
        said.append({"role": "user", "content": ask})
        said.append(post("/chat/completions", {"messages": said})["choices"][0]["message"])
        post("/rewards", {"reward": float(said[-1]["content"] == task["solution"])})

def expert(task, messages, tools):
    return task["solution"]

def wrong(task, messages, tools):
    return "wrong"
"""


def agents(folder: Path, **options: str) -> Config:
    """Return the configuration of a run whose agents post turn rewards and make two calls in each episode."""
    (folder / "earns.py").write_text(EARNS)
    rows = [json.dumps({"prompt": f"say {i}", "solution": str(i)}) for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    options = {"agent": f"{folder / 'earns.py'}:solve", "tasks": str(folder / "rows.jsonl"), **options}
    table = ", ".join(f"{name} = '{value}'" for name, value in options.items())
    return small(("environment.name", "agent"), ("environment.options", f"{{{table}}}"))


def test_an_agent_that_posts_turn_rewards_can_be_demonstrated_and_their_sum_decides(tmp_path: Path) -> None:
    config = agents(tmp_path, expert=f"{tmp_path / 'earns.py'}:expert")
    taskset = load_taskset(config.environment, 0)
    shown = demonstrate(config, taskset, Silent())
    assert len(shown) == config.warm_start.demonstrations
    assert all(len(one.conversations) == 2 for one in shown)
    tasks = taskset.tasks("eval", 3)  # their demonstrations are not what the agent does
    assert measure_baselines(taskset, tasks, max_turns=2, seed=0, progress=Silent()) == {}
    config = agents(tmp_path, expert=f"{tmp_path / 'earns.py'}:wrong")
    with pytest.raises(UserError, match="solved none"):
        demonstrate(config, load_taskset(config.environment, 0), Silent())


def test_examples_in_a_task_s_prompt_are_shown_in_demonstrations_and_not_trained(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"say {i}", "solution": str(i)}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = f"{{path = '{tmp_path / 'rows.jsonl'}', few_shot = [['say a', 'an example']]}}"
    config = small(("environment.name", "dataset"), ("environment.options", data), ("reward.name", "math"))
    made = prepare(config, Silent())
    for tokens, mask, _ in supervised_examples(config, made.tokenizer, made.demonstrations):
        assert "an example" in made.tokenizer.decode(tokens[~mask])
        assert made.tokenizer.decode(tokens[mask], skip_special_tokens=True).isdigit()
    tasks = load_taskset(config.environment, 0).tasks("warm_start", 1)
    inner = {"name": "dataset", "options": config.environment.options}
    agent = load_taskset(EnvironmentSettings(name="agent", options={"command": "true", "tasks": inner}), 0)
    expert = agent.agent_expert(tasks[0], seed=0)
    assert expert is not None
    assert expert((), ())["content"] == tasks[0].payload["solution"]


ECHO = """
class Echo:
    def reset(self, word):
        return f" {word}"
    def expert(self, word):
        yield word
    def get_reward(self):
        return 1.0
    def look(self) -> str:
        'Look.'
        return "nothing"
"""


def test_examples_in_the_prompt_of_a_tool_environment_are_shown_and_not_trained(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    told = [("system", "Echo."), ("user", "say a"), ("assistant", "an example"), ("user", "say")]
    prompt = [{"role": role, "content": text} for role, text in told]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": prompt, "word": str(i)}) for i in range(60)))
    data = f"{{environment_factory = '{tmp_path / 'echo.py'}:Echo', data = '{tmp_path / 'rows.jsonl'}'}}"
    config = small(("environment.name", "tools"), ("environment.options", data))
    made = prepare(config, Silent())
    for tokens, mask, _ in supervised_examples(config, made.tokenizer, made.demonstrations):
        said = made.tokenizer.decode(tokens[mask], skip_special_tokens=True)
        assert said.isdigit()
        assert "an example" in (shown := made.tokenizer.decode(tokens[~mask]))
        assert f"say {said}" in shown


def test_demonstrations_that_no_task_has_end_after_each_task_was_tried(tmp_path: Path) -> None:
    config = agents(tmp_path)  # the rows have one answer each
    taskset, own = load_taskset(config.environment, 0), AgentTaskset.agent_expert
    with (
        patch.object(AgentTaskset, "agent_expert", autospec=True, side_effect=own) as asked,
        pytest.raises(NoExpert, match=r"fewer answers.*environment\.options\.expert"),
    ):
        demonstrate(config, taskset, Silent())
    assert asked.call_count == config.environment.warm_start_tasks


def test_the_expert_baseline_is_perfect_and_the_random_one_is_poor() -> None:
    config = small()
    taskset = load_taskset(config.environment, 0)
    found = measure_baselines(taskset, taskset.tasks("eval", 12), max_turns=12, seed=0, progress=Silent())
    assert found["eval/baseline/expert"] == 1.0
    assert found["eval/baseline/random"] < 0.3


def test_a_single_turn_task_has_no_random_baseline() -> None:
    config = small(("environment.name", "reasoning_gym"), ("environment.options", '{task = "chain_sum"}'))
    taskset = load_taskset(config.environment, 0)
    found = measure_baselines(taskset, taskset.tasks("eval", 3), max_turns=1, seed=0, progress=Silent())
    assert found["eval/baseline/expert"] == 1.0
    assert "eval/baseline/random" not in found


def test_a_taskset_without_an_expert_of_these_tasks_has_no_baselines(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(99)))
    (tmp_path / "adds.py").write_text(EXPERT.partition("    def expert")[0])
    without = f"{{environment_factory = '{tmp_path / 'adds.py'}:Adds', data = '{rows}'}}"
    others = {"gymnasium": '{id = "CartPole-v1"}', "reasoning_gym": '{task = "propositional_logic"}'}
    for name, options in {"tools": without, **others}.items():
        if name == "gymnasium" and not find_spec(name):
            continue
        config = small(("environment.name", name), ("environment.options", options))
        taskset = load_taskset(config.environment, 0)
        tasks = taskset.tasks("eval", 2)
        found = measure_baselines(taskset, tasks, max_turns=2, seed=0, progress=Silent())
        assert not found, name


def test_demonstrations_of_a_mixture_come_from_its_parts_with_an_expert(tmp_path: Path) -> None:
    parts = []
    for name, code in (("shown", EXPERT), ("unshown", EXPERT.partition("    def expert")[0])):
        (tmp_path / f"{name}.py").write_text(code)
        rows = "".join(f'{{"prompt": "{name} {i}?", "answer": "{i}"}}\n' for i in range(99))
        (tmp_path / f"{name}.jsonl").write_text(rows)
        options = f"environment_factory = '{tmp_path / name}.py:Adds', data = '{tmp_path / name}.jsonl'"
        parts.append(f"{{name = 'tools', label = '{name}', options = {{{options}}}}}")
    config = small(("environment.name", "mixture"), ("environment.options", f"{{parts = [{', '.join(parts)}]}}"))
    found = demonstrate(config, load_taskset(config.environment, 0), Silent())
    assert len(found) == config.warm_start.demonstrations
    assert {str(one.conversations[0][0][0]["content"]).split()[0] for one in found} == {"shown"}
    alone = small(("environment.name", "mixture"), ("environment.options", f"{{parts = [{parts[1]}]}}"))
    with pytest.raises(NoExpert, match="has no method `expert`"):
        demonstrate(alone, load_taskset(alone.environment, 0), Silent())


def test_one_process_makes_a_warm_start_while_others_wait_and_a_killed_one_leaves_nothing(cache: Path) -> None:
    """Threads stand for the processes."""
    waits, made = threading.Event(), list[int]()
    given = prepare(small(("warm_start.enabled", "false")), Silent())

    class Watched(Silent):
        def print(self, text: str) -> None:
            waits.set()

    def train(*args: Any, **options: Any) -> dict[str, float]:
        made.append(1)
        if len(made) > 1:
            waits.set()
        assert waits.wait(60)
        return fine_tune(*args, **options)

    def start(model: torch.nn.Module) -> torch.nn.Module:
        return warm_start(small(), model, given.tokenizer, given.demonstrations, Watched())

    trained = warm_start(small(), copy.deepcopy(given.model), given.tokenizer, given.demonstrations, Silent())
    (folder,) = (path for path in (cache / "warm-start").iterdir() if path.is_dir())
    left = folder.with_name(f".partial-01234567-{folder.name}")
    folder.rename(left)
    with patch("gleanrl.runtime.prepare.fine_tune", train), ThreadPoolExecutor() as pool:
        both = list(pool.map(start, [copy.deepcopy(given.model) for _ in range(2)]))
    assert len(made) == 1
    assert not left.exists()
    for model in both:
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(trained), strict=True))
