"""An agent that is a loop around OpenAI's client, which speaks chat completions.

Train it with `gleanrl train examples/agents/calculator.toml`, which names it.
"""

import json
from typing import Any

from openai import AsyncOpenAI

OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}
TOOL = {
    "name": "calculate",
    "description": "Calculate with two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "operation": {"type": "string", "enum": list(OPERATIONS)},
        },
        "required": ["a", "b", "operation"],
    },
}


def run_tool(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(OPERATIONS[given["operation"]](int(given["a"]), int(given["b"])))
    except (KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the agent's answer is right, else 0."""
    messages: list[Any] = [
        {"role": "system", "content": "Answer with the number alone."},
        {"role": "user", "content": task["row"]["prompt"]},
    ]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(
                model=model, messages=messages, tools=[{"type": "function", "function": TOOL}]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(message.content == str(task["row"]["answer"]))
            for call in message.tool_calls:
                result = run_tool(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
