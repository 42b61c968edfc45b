"""vLLM 0.28 and later, started so that tokens go in and out and that weights can be loaded.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --enable-scale-out
        --logprobs-mode processed_logprobs --generation-config vllm

What it lacks: with top-p, top-k or min-p its log-probs are renormalised and the kept mass is not reported, so a run may not
truncate. On a CPU it keeps a tied output layer, and mixtures, as they were when weights are loaded: the probe sees it, and
a server that the run started is then restarted at every publish.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.rollouts.servers.dialects.base import ServerFacts, StartPlan, check_version
from legato.rollouts.servers.dialects.generate import ADAPTER, GenerateDialect
from legato.rollouts.servers.engine import ask_model
from legato.rollouts.servers.errors import RefusedError
from legato.rollouts.servers.http import HttpClient

LOWEST = (0, 28)


class Vllm(GenerateDialect):
    """A server of vLLM."""

    name = "vllm"
    option = (
        "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --enable-scale-out"
        " --logprobs-mode processed_logprobs --generation-config vllm"
    )

    def __init__(self) -> None:
        self._adapted: set[str] = set()
        """Addresses of servers that have the adapter: requests name it."""

    def facts(self, client: HttpClient, seconds: float) -> ServerFacts:
        reply = client.get("/version", seconds=seconds)
        if "server" in reply:
            raise InputError(
                f"expected vLLM at {client.url}, got {reply['server']} (rollouts.engine = 'vllm'); use"
                f" rollouts.engine={reply['server']}"
            )
        version = check_version("vLLM", client.url, reply.get("version"), LOWEST)
        model = ask_model(client, seconds)
        self._check_endpoints(client, seconds)
        return ServerFacts(
            software=f"vLLM {version}",
            model=model.name,
            context_tokens=model.context_tokens,
            adapters=self._takes_adapters(client, seconds),
        )

    def _check_endpoints(self, client: HttpClient, seconds: float) -> None:
        """InputError if the server was started without the endpoints that a run needs."""
        try:
            client.get("/weight_info", seconds=seconds)
            client.get("/is_paused", seconds=seconds)
        except RefusedError as error:
            raise InputError(
                f"expected a vLLM server with its development endpoints at {client.url}, got {error} (rollouts.servers);"
                f" start it with {self.option}"
            ) from None
        try:
            client.post("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, seconds=seconds)
        except RefusedError as error:
            if error.status in (403, 404):
                raise InputError(
                    f"expected a vLLM server that takes token ids at {client.url}, got {error} (rollouts.servers); start it"
                    f" with {self.option}"
                ) from None

    def _takes_adapters(self, client: HttpClient, seconds: float) -> bool:
        """Whether adapters can be loaded. The empty names are refused by every server that knows the endpoint."""
        try:
            client.tell("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}, seconds=seconds)
        except RefusedError as error:
            return error.status == 400
        return True

    def prepare(self, client: HttpClient, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "model": ADAPTER} if client.url in self._adapted else body

    def load_paused(self, client: HttpClient, folder: Path, adapters: bool, seconds: float) -> None:
        if not adapters:
            super().load_paused(client, folder, adapters, seconds)
            return
        body = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
        client.tell("POST", "/v1/load_lora_adapter", body, seconds=seconds)
        self._adapted.add(client.url)

    def command(self, plan: StartPlan) -> tuple[list[str], Mapping[str, str]]:
        words = [
            *(plan.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(plan.model), "--host", "127.0.0.1", "--port", str(plan.port)),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--dtype", plan.dtype, "--max-model-len", str(plan.context_tokens)),
        ]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": plan.key}
        if plan.lora_rank:
            words += ["--enable-lora", "--max-lora-rank", str(plan.lora_rank)]
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if plan.device == "cpu":
            # Without it vLLM takes most of the machine's memory, and refuses to start where others use it.
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        return [*words, *plan.arguments], environment
