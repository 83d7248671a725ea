"""A verifiers v1 taskset with a tool, whose server belongs to one task or is shared by all tasks.

The tool servers run this file as a program.
"""

import verifiers.v1 as vf

FACTS = {f"stone {number}": f"fact {number * 7}" for number in range(40)}


class Facts(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "facts"

    @vf.tool
    def lookup(self, name: str) -> str:
        """What is known of a stone."""
        return FACTS.get(name, "nothing")


class SharedFacts(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shared"

    @vf.tool
    def lookup(self, name: str) -> str:
        """What is known of a stone."""
        return FACTS.get(name, "nothing")


class FactsTaskConfig(vf.TaskConfig):
    own: bool = True


class FactsConfig(vf.TasksetConfig):
    task: FactsTaskConfig = FactsTaskConfig()
    shared: bool = False


class FactsData(vf.TaskData):
    answer: str


class FactsTask(vf.Task[FactsData, vf.State, FactsTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(vf.ToolsetConfig())] if config.own else []

    @vf.intercept
    async def secret(self, request: vf.Request) -> vf.Request | None:
        """Replace the tool's result "fact 0" by "secret" in what the model sees."""
        last = request.messages[-1]
        if isinstance(last, vf.ToolMessage) and last.content == "fact 0":
            return request.model_copy(
                update={"messages": [*request.messages[:-1], last.model_copy(update={"content": "secret"})]}
            )
        return None

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class FactsTaskset(vf.Taskset[FactsTask, FactsConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SharedFacts(vf.SharedToolsetConfig())] if config.shared else []

    def load(self):
        for name, fact in FACTS.items():
            yield FactsTask(FactsData(prompt=f"What is known of {name}?", answer=fact), self.config.task)


__all__ = ["FactsTaskset"]

if __name__ == "__main__":
    import os

    (SharedFacts if '"colocated"' not in os.environ["VF_CONFIG"] else Facts).run()
