"""An environment of verifiers: additions as tasks, and a harness that asks once. verifiers finds it by its module's name."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class Addition(vf.TaskData):
    """An addition and its answer."""

    answer: str


class AdditionTask(vf.Task[Addition]):
    """Rewards a response that holds the answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.nodes[-1].message.content))


class Additions(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    """Four additions."""

    def load(self) -> Iterable[AdditionTask]:
        for number in range(2, 6):
            yield AdditionTask(Addition(prompt=f"add {number} and 3", answer=str(number + 3)), self.config.task)


class OneQuestionConfig(vf.HarnessConfig):
    """Nothing to configure."""


class OneQuestion(vf.Harness[OneQuestionConfig]):
    """Asks the model once, in this process, through the endpoint that verifiers puts before the server."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **_: Any,
    ) -> vf.ProgramResult:
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": str(data.prompt)}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Additions", "OneQuestion"]
