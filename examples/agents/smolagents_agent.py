"""An agent of smolagents, which speaks OpenAI's chat completions and sends tool calls and results back as plain text.

Train it with `gleanrl train examples/agents/calculator.toml --environment.options.agent
examples/agents/smolagents_agent.py:solve --environment.options.expert examples/agents/smolagents_agent.py:expert`.
"""

from typing import Any

import openai  # noqa: F401 - smolagents imports it late, which would take a second in each episode
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.monitoring import LogLevel

from gleanrl.environments.tools import call

# The system prompt of the package has 2,000 tokens.
PROMPTS: Any = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Give the number alone to final_answer."}


@tool
def calculate(a: int, b: int, operation: str) -> int:
    """Calculate with two whole numbers.

    Args:
        a: The first number.
        b: The second number.
        operation: The word plus, minus or times.
    """
    return {"plus": a + b, "minus": a - b, "times": a * b}[operation]


def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the agent's answer is right, else 0."""
    chat = OpenAIServerModel(model, api_base=base_url, api_key=api_key, tool_choice="auto")
    agent = ToolCallingAgent([calculate], chat, PROMPTS, max_steps=3, verbosity_level=LogLevel.OFF)
    return float(str(agent.run(task["row"]["prompt"])) == str(task["row"]["answer"]))


def expert(task: dict[str, Any], messages: Any, tools: Any) -> Any:
    """Answer a model call of the agent: call the tool, then give its result as the final answer."""
    row = task["row"]
    if "Observation" in messages[-1]["content"]:
        return call("final_answer", answer=str(row["answer"]))
    return call("calculate", a=row["a"], b=row["b"], operation=row["word"])
