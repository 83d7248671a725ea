"""Tests of `gleanrl export`: the model, adapters as peft loads them, the model card, and the upload to a hub."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from gleanrl.config.loading import load_defaults
from gleanrl.tracking.model_card import model_card
from tests.cli.conftest import ENVIRONMENT, CommandLine, Ended, Server
from tests.cli.hub import Hub

Whole = tuple[CommandLine, Ended]
TOKEN = "hf_of_the_test"
LORA = ("--learner.lora_rank", "4", "--learner.lr", "1e-2", "--run.steps", "4")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 30)[None]).logits


def adapted(folder: Path, base: Path | str) -> torch.Tensor:
    """Return the logits of the adapters in ``folder`` on top of the model at ``base``, as peft loads them."""
    peft = pytest.importorskip("peft")
    return logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


def test_adapters_on_their_base_are_the_merged_model(gleanrl: CommandLine) -> None:
    """The base has had a warm start, so it is written next to the adapters."""
    pytest.importorskip("peft")
    assert gleanrl.train("run", *LORA).status == 0
    for source in ("run", "runs/run/checkpoints/step-2"):
        for option in ((), ("--adapters",)):
            ended = gleanrl("export", source, *option)
            assert ended.status == 0, ended.stderr
            assert Path(gleanrl.folder / ended.stdout.split(": ")[1].strip()).is_dir()
    folder = gleanrl.run("run").path
    seen = []
    for step in (4, 2):
        adapters = folder / "exports" / f"step-{step}-adapters"
        settings = json.loads((adapters / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (4, 32.0)
        base = settings["base_model_name_or_path"]
        merged = logits(AutoModelForCausalLM.from_pretrained(folder / "exports" / f"step-{step}"))
        torch.testing.assert_close(adapted(adapters, base), merged, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), merged, rtol=1e-3, atol=1e-3)
        seen.append(merged)
    assert torch.equal(seen[0], logits(AutoModelForCausalLM.from_pretrained(folder / "model")))
    assert not torch.equal(*seen)


def test_what_cannot_be_exported_is_refused_in_one_line(whole: Whole) -> None:
    gleanrl, _ = whole
    for argv in (
        ("whole", "--adapters"),  # no adapters
        ("runs/whole/model",),
        ("whole", "--out", "runs"),
        ("whole", "--private"),
        ("whole", "--push-to-hub", "not/a/name"),
        ("whole", "--push-to-hub", "me/agent"),  # HF_HUB_OFFLINE is set
        ("tiny.toml",),
        ("runs/whole/checkpoints/step-5",),
    ):
        ended = gleanrl.here("export", *argv)
        assert (ended.status, ended.stdout) == (2, "")
        assert ended.complaint
    assert not (gleanrl.run("whole").exports_path).exists()


def test_the_card_of_a_model_tells_what_the_run_measured(whole: Whole, tmp_path: Path) -> None:
    gleanrl, _ = whole
    out = tmp_path / "earlier"
    assert gleanrl("export", "runs/whole/checkpoints/step-4", "--out", str(out), "--learner.lr", "9").status == 0
    rows = {row.step: row.metrics.get("eval/sampled/pass@1", 0.0) for row in gleanrl.run("whole").read_metrics()}
    for folder, last in ((gleanrl.run("whole").model_path, 6), (out, 3)):
        card = ModelCard.load(folder / "README.md")
        assert card.data.library_name == "transformers"
        assert "reinforcement-learning" in (card.data.tags or [])
        [line] = [line for line in card.text.splitlines() if line.startswith("| success, sampled")]
        for step, cell in zip((0, last), line.split("|")[2:], strict=False):
            assert cell.strip().startswith(f"{100 * rows[step]:.1f} %")
        assert "/parity.py" not in card.text  # folders of this machine are left out
        (tmp_path / "again.toml").write_text(card.text.partition("```toml\n")[2].partition("```")[0])
        # Settings of the export do not describe the training.
        assert tomllib.loads((tmp_path / "again.toml").read_text())["learner"] == {"lr": 5e-4}
        again = ("--environment.name", f"{ENVIRONMENT}:Parity", "--dry-run")
        assert gleanrl("train", str(tmp_path / "again.toml"), *again).status == 0


def test_keys_and_folders_do_not_reach_the_card() -> None:
    """Whether they are whole values or parts of longer texts. Other texts stay as they are."""
    kept = {
        "mode": "/no_think",
        "prompt": "Answer with yes/no, see https://example.org/a/b: <think>1/2</think> costs 3 = 1 + 2.",
        "query": "s3://bucket/data/train.jsonl",
    }
    options = {
        **kept,
        "dsn": "postgresql://me:opensesame@host/db",
        "login": "the server is http://me:opensesame@host:80/x, ask me",
        "command": "serve --api-key opensesame --data=/home/me/data --password='opensesame'",
        "headers_text": "X-Note: a Authorization: Basic opensesame=",
        "notes": "read /home/me/a.jsonl, ~/b.jsonl (or ~me/c.jsonl) and file:///home/me/d.jsonl; D:\\home\\me\\e.jsonl",
        "reward": "verl:/home/me/reward.py:score",
        "spaced": "/home/me/my files/f.jsonl",
        "api_key": "opensesame",
        "headers": ["Bearer abcdef123456"],
        "url": "http://me:opensesame@host/",
        "weights": {"/home/me/data.jsonl": 1.0},
        "token": "env:SERVICE_TOKEN",
    }
    card = model_card(load_defaults([("environment.options", options)]), [], 3, adapters=False)
    settings = tomllib.loads(card.partition("```toml\n")[2].partition("```")[0])["environment"]["options"]
    assert not [text for text in ("opensesame", "abcdef123456", "home", "my files") if text in card]
    assert settings.keys() == options.keys()
    assert {name: settings[name] for name in kept} == kept
    assert settings["notes"] == "read a.jsonl, b.jsonl (or c.jsonl) and d.jsonl; e.jsonl"
    assert (settings["reward"], settings["spaced"]) == ("verl:reward.py:score", "f.jsonl")
    assert (settings["token"], settings["weights"]) == ("env:SERVICE_TOKEN", {"data.jsonl": 1.0})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(TOKEN).serving() as hub:
        yield hub


REFUSALS = [
    ("repos/create", 401, "token"),
    ("repos/create", 409, "not understood"),  # it lacks the address of the repository
    ("repos/create", 500, "500"),
    ("repos/create", 0, "Timeout"),
    ("preupload", 404, "repository"),
    ("commit", 403, "token"),
    ("commit", 409, "409"),
]
RETRIED = [("commit", 500, "500"), ("commit", 0, "Timeout")]  # the hub's client tries these again for half a minute


@pytest.mark.slow
@pytest.mark.parametrize("failures", [REFUSALS, pytest.param(RETRIED, marks=pytest.mark.heavy)])
def test_a_hub_that_refuses_or_does_not_answer_ends_the_upload_in_one_line(
    hub: Hub, whole: Whole, environment: dict[str, str], tmp_path: Path, failures: list[tuple[str, int, str]]
) -> None:
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN}
    environment = {**environment, **online, "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    server = Server(environment)
    gleanrl = CommandLine(whole[0].folder, server, environment)
    try:
        for place, status, said in failures:
            hub.fails = (place, status)
            ended = gleanrl(
                "export", "whole", "--out", str(tmp_path / f"{place[:6]}{status}"), "--push-to-hub", "me/it"
            )
            assert ended.status == 2, (place, status)
            assert said in ended.complaint
            assert "me/it" in ended.complaint
            assert "uploaded" not in ended.stdout
            assert not hub.repositories.get("me/it")
        hub.fails = None
        assert gleanrl("export", "whole", "--out", str(tmp_path / "it"), "--push-to-hub", "me/it").status == 0
        assert "config.json" in hub.repositories["me/it"]
    finally:
        server.close()


@pytest.mark.slow
def test_a_folder_is_uploaded_with_its_card(
    hub: Hub, whole: Whole, environment: dict[str, str], tmp_path: Path
) -> None:
    """The base model of the run comes from the same hub, so the adapters can be loaded by those who download them."""
    pytest.importorskip("peft")
    start = whole[0].run("whole").model_path
    hub.repositories["they/base"] = {path.name: path.read_bytes() for path in start.iterdir()}
    hub.cards["they/base"] = {"license": "apache-2.0"}
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN}
    environment = {**environment, **online}
    server = Server(environment)
    gleanrl = CommandLine(tmp_path, server, environment)
    (tmp_path / "tiny.toml").write_text((whole[0].folder / "tiny.toml").read_text())
    try:
        cold = ("--model.init", "they/base", "--warm_start.enabled", "false")
        ended = gleanrl.train("run", *LORA, *cold)
        assert ended.status == 0, ended.stderr
        # The environment is not needed, and may be a service that does not run.
        gone = ("--environment.name", "gone.py:Gone")
        ended = gleanrl("export", "run", "--adapters", "--push-to-hub", "me/adapters", "--private", *gone)
        assert ended.status == 0, ended.stderr
        assert f"{hub.url}/me/adapters" in ended.stdout
        assert gleanrl("export", "run", "--push-to-hub", "me/agent").status == 0
        assert hub.private == {"me/adapters"}
        for name, folder in (("me/adapters", "step-4-adapters"), ("me/agent", "step-4")):
            local = gleanrl.run("run").exports_path / folder
            assert hub.repositories[name] == {path.name: path.read_bytes() for path in local.iterdir()}
            data = ModelCard.load(local / "README.md").data
            assert (data.base_model, data.license) == ("they/base", "apache-2.0")
        adapters = gleanrl.run("run").exports_path / "step-4-adapters"
        assert json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"] == "they/base"
        merged = logits(AutoModelForCausalLM.from_pretrained(gleanrl.run("run").model_path))
        torch.testing.assert_close(adapted(adapters, start), merged, rtol=1e-5, atol=1e-5)

        # An upload replaces the weights of an earlier one, which transformers would load instead, and no other file.
        hub.repositories["me/adapters"]["figure.png"] = b""
        assert gleanrl("export", "run", "--push-to-hub", "me/adapters").status == 0
        assert hub.repositories["me/adapters"].pop("figure.png") == b""
        assert hub.repositories["me/adapters"].keys() == hub.repositories["me/agent"].keys()

        gleanrl.extra["HF_TOKEN"] = "hf_of_another"
        assert "token" in gleanrl("export", "run", "--push-to-hub", "me/third").complaint
        assert "me/third" not in hub.repositories
        gleanrl.extra["HF_TOKEN"] = ""
        assert "HF_TOKEN" in gleanrl("export", "run", "--push-to-hub", "me/third").complaint
        # No one else could load the base of these adapters.
        gleanrl.extra["HF_TOKEN"] = TOKEN
        local = ("--model.init", str(start))
        assert "base model" in gleanrl("export", "run", "--adapters", "--push-to-hub", "me/third", *local).complaint
        hub.http.shutdown()
        hub.http.server_close()
        # Without a base model to ask the hub about, which its client would try for half a minute.
        assert "me/third" in gleanrl("export", "run", "--push-to-hub", "me/third", *local).complaint
    finally:
        server.close()
