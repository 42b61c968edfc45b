"""Routers without our code: their choices on one text, and models in which choices are forced by a plain forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from legato.core.texts import Texts
from legato.policy.policy import Policy
from tests.policy import exact

FAMILIES = ("qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "gpt-oss")


def as_published(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small random model of a family, with the routers of transformers."""
    config_class, own = exact.FAMILIES[name]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}  # grouped products need rows of whole 16 bytes
    config = getattr(transformers, config_class)(**{**exact._COMMON, **own, **sizes, **changes})
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.15 * torch.randn(parameter.shape).to(dtype))
    return model


def routers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def logits_of(router: Any, hidden: Tensor) -> Tensor:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    return logits + router.bias if hasattr(router, "bias") else logits


@contextmanager
def record_router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the context, every router call appends its logits to the list."""
    logits: list[Tensor] = []

    def before(router: Any, inputs: Any) -> None:
        logits.append(logits_of(router, inputs[0]))

    with ExitStack() as stack:
        for router in routers_of(model):
            stack.callback(router.register_forward_pre_hook(before).remove)
        yield logits


def whole(texts: Texts, row: int) -> Tensor:
    """Prompt and response of a row."""
    prompt = texts.prompts[texts.group[row], : texts.prompt_lengths[texts.group[row]]]
    return torch.cat([prompt, texts.tokens[row, : texts.lengths[row]]])


def plain_logits(policy: Policy, texts: Texts, row: int) -> Tensor:
    """[P + T - 1, M, E]: the logits of all routers at every token of a row but the last, the row alone in the model."""
    with record_router_logits(policy.model) as logits, torch.no_grad():
        policy.model(input_ids=whole(texts, row)[:-1][None], use_cache=False)
    return torch.stack(logits, 1)


def family_gates(name: str, logits: Tensor, experts: Tensor) -> Tensor:
    """The gates of some experts, from the papers and model cards, in the dtype of the logits."""
    if name == "gpt-oss":
        return logits.gather(-1, experts).softmax(-1)
    chosen = logits.softmax(-1).gather(-1, experts)
    return chosen if name in ("qwen2-moe", "olmoe") else chosen / chosen.sum(-1, keepdim=True)


@contextmanager
def force_experts(policy: Policy, name: str, choices: Callable[[int], Tensor | None]) -> Iterator[None]:
    """Inside the context, the routers use the experts [N, K] that `choices(layer)` returns; None: their own."""
    routers = routers_of(policy.model)
    own = [router.forward for router in routers]

    def make(layer: int, router: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            experts = choices(layer)
            if experts is None:
                return own[layer](hidden)  # type: ignore[no-any-return]
            logits = logits_of(router, hidden)
            return logits, family_gates(name, logits, experts), experts

        return forward

    for layer, router in enumerate(routers):
        router.forward = make(layer, router)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def chosen_by(logits: Tensor, active: int = 2) -> Tensor:
    return logits.topk(active, dim=-1).indices


def sets(experts: Tensor) -> list[Any]:
    """The experts of each token as sorted lists, so that their order does not matter."""
    return experts.long().sort(-1).values.tolist()  # type: ignore[no-any-return]


def rows_with_tokens(texts: Texts) -> Sequence[int]:
    return [row for row in range(len(texts.tokens)) if texts.lengths[row] > 0]
