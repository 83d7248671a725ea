"""An agent of the OpenAI Agents SDK, which speaks OpenAI's responses.

Train it with `gleanrl train examples/agents/calculator.toml --environment.options.agent
examples/agents/openai_agents.py:solve`.
"""

from typing import Any, Literal

from agents.exceptions import AgentsException
from openai import AsyncOpenAI

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def calculate(a: int, b: int, operation: Literal["plus", "minus", "times"]) -> int:
    """Calculate with two whole numbers.

    Args:
        a: The first number.
        b: The second number.
        operation: What to do with them.
    """
    return {"plus": a + b, "minus": a - b, "times": a * b}[operation]


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the agent's answer is right, else 0."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="calculator",
            instructions="Answer with the number alone.",
            model=OpenAIResponsesModel(model, client),
            tools=[calculate],
        )
        try:
            result = await Runner.run(agent, task["row"]["prompt"], max_turns=4)
        except AgentsException:  # the model has called a tool that does not exist, or has made too many calls
            return 0.0
    return float(result.final_output == str(task["row"]["answer"]))
