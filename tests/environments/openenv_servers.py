"""Two OpenEnv servers for tests: a guessing game whose action is a number, and one whose actions are tool calls."""

from typing import Any

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


guess = create_app(GuessEnvironment, Guess, Heard, env_name="guess", max_concurrent_envs=8)
sums = create_app(SumEnvironment, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=4)
