"""A verifiers v1 taskset with weighted rewards, a metric, a stop condition, a setup hook and several turns."""

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    first: int = 0
    count: int = 200
    guesses: int = 1
    repeats: int = 0


class SumsData(vf.TaskData):
    answer: str
    guesses: int = 1


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace) -> None:
        trace.info["began"] = True

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task: SumsData, trace: vf.Trace) -> dict[str, float]:
        return {"short_text": float(len(trace.last_reply) < 5)}

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        assert trace.info["began"]
        return float(trace.num_turns)


class SumsEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        if task.data.guesses == 1:
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in reversed(range(task.data.guesses - 1)):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                if segment.last_reply == "crash":
                    raise ValueError("the engine broke")
                segment = await interaction.turn(f"No. {left + 1} left.")


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        first = self.config.first
        for number in [*[first] * self.config.repeats, *range(first, first + self.config.count)]:
            yield SumsTask(
                SumsData(
                    system_prompt="Answer with a number.",
                    prompt=f"{number} + 1 = ?",
                    answer=str(number + 1),
                    guesses=self.config.guesses,
                ),
                self.config.task,
            )


__all__ = ["SumsEnv", "SumsTaskset"]
