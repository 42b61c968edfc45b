"""The options of engines that sample at servers: `rollouts.servers`."""

from legato.core.fields import choice, integer, number, text, texts
from legato.core.settings import settings


@settings(resume="free")
class ServerSettings:
    """The servers that sample, and what is expected of them."""

    urls: tuple[str, ...] = texts(
        default=(), says='Addresses of servers that run already: ["http://10.0.0.2:8000"]. Their key: LEGATO_SERVER_KEY.'
    )
    start: int = integer(
        default=0,
        says="How many servers the run starts on this machine, watches and ends; in place of urls.",
        minimum=0,
        maximum=64,
    )
    python: str | None = text(
        default=None,
        says="The Python that has vLLM or SGLang installed, for servers that the run starts; absent: the run's own.",
        optional=True,
    )
    arguments: tuple[str, ...] = texts(
        default=(), says='Further words of the start command: ["--gpu-memory-utilization", "0.8"].'
    )
    devices: tuple[str, ...] = texts(
        default=(),
        says="CUDA_VISIBLE_DEVICES of each server that is started; empty: the GPUs that no process of the run trains on, or"
        " the run's own if there are none.",
    )
    quorum: int = integer(
        default=1, says="With fewer servers that answer, the run pauses until others come back.", minimum=1
    )
    request_seconds: float = number(
        default=600.0, says="How long a server may take for one response, waiting in its queue included.", above=0.0
    )
    pause_seconds: float = number(
        default=900.0,
        says="How long the run pauses for want of servers before it saves its state and ends.",
        minimum=0.0,
    )
    start_seconds: float = number(
        default=600.0, says="How long a server that the run starts may take until it answers.", above=0.0
    )
    publish_seconds: float = number(default=600.0, says="How long a server may take to load new weights.", above=0.0)
    folder: str | None = text(
        default=None,
        says="Where weights are written for servers to read; on other machines it must be the same folder. Absent: in the"
        " run directory.",
        optional=True,
    )
    lora: str = choice(
        "auto",
        "adapters",
        "merged",
        default="auto",
        says="How adapters (policy.lora) are published: as adapters, or merged into the weights; auto: as adapters where the"
        " server takes them.",
    )
    probe_tolerance: float | None = number(
        default=None,
        says="The largest mean difference between log-probs of trainer and server on the fixed texts that are compared after"
        " every publish; absent: 0.001 in float32, 0.05 in 16 bits.",
        above=0.0,
        optional=True,
    )
