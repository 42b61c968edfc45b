"""`legato serve`: the engine "local" behind HTTP (docs/serve.md). The same seeds give the same responses as here."""

from collections.abc import Mapping

from legato.errors import InputError
from legato.rollouts.servers.dialects.base import ServerFacts, StartPlan
from legato.rollouts.servers.dialects.generate import GenerateDialect
from legato.rollouts.servers.engine import ask_model
from legato.rollouts.servers.http import HttpClient


class Own(GenerateDialect):
    """A server of ours."""

    name = "legato"
    option = "legato serve FOLDER"
    truncation = True
    reads_untied = False

    def facts(self, client: HttpClient, seconds: float) -> ServerFacts:
        reply = client.get("/version", seconds=seconds)
        if reply.get("server") != "legato":
            raise InputError(
                f"expected `legato serve` at {client.url}, got another server (rollouts.engine = 'legato'); use"
                " rollouts.engine=vllm for vLLM and rollouts.engine=sglang for SGLang"
            )
        model = ask_model(client, seconds)
        return ServerFacts(
            software=f"Legato {reply.get('version')}",
            model=model.name,
            context_tokens=model.context_tokens,
            vocabulary=model.vocabulary,
            adapters=model.adapters,
        )

    def command(self, plan: StartPlan) -> tuple[list[str], Mapping[str, str]]:
        words = [
            *(plan.python, "-m", "legato", "serve", str(plan.model)),
            *("--port", str(plan.port), "--context", str(plan.context_tokens)),
            *("--max-requests", str(max(2048, 2 * plan.sequences))),
            *(f"policy.dtype={plan.dtype}", f"policy.device={plan.device}"),
        ]
        return [*words, *plan.arguments], {"LEGATO_SERVER_KEY": plan.key}
