"""An environment of verifiers with several turns: its harness keeps the conversation and asks again."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class Round(vf.TaskData):
    """How often the model is asked."""

    turns: int


class RoundTask(vf.Task[Round]):
    """Rewards every turn of the model."""

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns / self.data.turns

    @vf.reward(weight=0.5)
    async def answered(self, trace: vf.Trace) -> float:
        return float(trace.last_reply is not None)


class Rounds(vf.Taskset[RoundTask, vf.TasksetConfig]):
    """Conversations of one to three turns."""

    def load(self) -> Iterable[RoundTask]:
        for number in range(6):
            yield RoundTask(Round(prompt=f"say {number}", turns=1 + number % 3), self.config.task)


class ChatConfig(vf.HarnessConfig):
    """Nothing to configure."""


class Chat(vf.Harness[ChatConfig]):
    """A chat loop in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: Any, **_: Any,
    ) -> vf.ProgramResult:  # fmt: skip
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": str(data.prompt)}]
        for turn in range(data.turns):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=12)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": f"and {turn}?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Chat", "Rounds"]
