"""Two OpenEnv servers for tests: a guessing game whose action is a number, and one whose actions are tool calls."""

from typing import Any, ClassVar

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Heard(Observation):
    messages: list[dict[str, str]]
    prompt: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.tries = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 10, **_: Any) -> Heard:
        self.secret = (seed or 0) % highest + 1
        said = [{"role": "user", "content": f"Between 1 and {highest}."}]
        return Heard(prompt="Guess a number.", messages=said)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Heard:
        self.tries += 1
        if action.number == 666:
            raise RuntimeError("the engine broke")
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Heard(messages=[{"content": hint}], done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


class SumEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(metadata={"question": "1 + 2"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


class ListedEnvironment(GuessEnvironment):
    """A guessing game with 5 tasks to train on and 3 to test, which it lists."""

    COUNTS: ClassVar = {"train": 5, "test": 3}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Heard:
        observed = super().reset(task["index"] + 100 * (task["split"] == "test"))
        observed.messages[0]["content"] = f"{task['split']} {task['index']}"
        return observed

    def list_splits(self) -> list[str]:
        return list(self.COUNTS)

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split, 0, None)

    def num_tasks(self, split: str) -> int:
        return self.COUNTS[split]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{index}", "index": index} for index in range(self.COUNTS[split])[start:stop]]


guess = create_app(GuessEnvironment, Guess, Heard, env_name="guess", max_concurrent_envs=8)
listed = create_app(ListedEnvironment, Guess, Heard, env_name="listed", max_concurrent_envs=8)
sums = create_app(SumEnvironment, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=4)
