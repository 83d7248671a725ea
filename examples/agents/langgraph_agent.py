"""An agent as a graph of LangGraph, which speaks OpenAI's chat completions.

Train it with `gleanrl train examples/agents/calculator.toml --environment.options.agent
examples/agents/langgraph_agent.py:solve`.
"""

from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculate(a: int, b: int, operation: Literal["plus", "minus", "times"]) -> int:
    """Calculate with two whole numbers."""
    return {"plus": a + b, "minus": a - b, "times": a * b}[operation]


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the agent's answer is right, else 0."""
    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model).bind_tools([calculate])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculate]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    opening = [("system", "Answer with the number alone."), ("user", task["row"]["prompt"])]
    try:
        result = await graph.compile().ainvoke({"messages": opening}, {"recursion_limit": 8})
    except GraphRecursionError:  # the model has called the tool again and again
        return 0.0
    return float(result["messages"][-1].content == str(task["row"]["answer"]))
