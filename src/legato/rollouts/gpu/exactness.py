"""Whether the engine of a policy can equal the trainer to the bit. It is tried on a few responses before it is believed.

An exact engine saves scoring the old policy: its own log-probs are the old ones. It decodes a little slower, the more so the
fewer rows decode together (docs/exact.md has the measurements).
"""

import torch
from torch import nn

from legato.core.texts import Texts
from legato.policy.head.head import Head
from legato.policy.layers.layer import is_plain
from legato.policy.layers.products import MOST_PADDED, least_rows
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.walk import first_difference
from legato.rollouts.local.agreement import describe_failure
from legato.rollouts.prompts import response_texts
from legato.rollouts.sampling import Sampling

_PROMPT, _TOKENS = 100, 70
"""The longest prompt and the length of responses: more than one tile of 64 keys each."""
_SCORED_AT_ONCE = 64
_FEW_ROWS = (1, 2, 3, 9)
"""Numbers of rows whose bits are compared before an exact engine is used, beside the engine's most."""


def why_not_exact(policy: Policy) -> str | None:
    """Why engine and trainer of a policy cannot be equal to the bit; None if they can as far as is known."""
    if (reason := policy.why_not_fused()) is not None:
        return f"training does not run through fused layers: {reason}"
    decoder = policy.body.get_decoder()
    weight, width = decoder.embed_tokens.weight, decoder.layers[0].self_attn.head_dim
    if weight.dtype != torch.bfloat16:
        return f"the weights are in {str(weight.dtype).removeprefix('torch.')}, not in bfloat16"
    if torch.cuda.get_device_capability(weight.device)[0] != 9:
        return "the GPU is not a Hopper (H100, H200)"
    if policy.divided:
        return "its layers are divided among ranks"
    if policy.routers is not None:
        return "it is a mixture of experts, whose products depend on how many tokens an expert gets"
    if not all(is_plain(layer) for layer in decoder.layers):
        return "its layers have adapters (LoRA), hooks or projections that are not plain"
    if width not in (16, 32, 64, 128):
        return f"its heads have a width of {width}; 16, 32, 64 and 128 are supported"
    linear = Head.from_body(policy.body).linear
    if type(linear) is not nn.Linear or linear.bias is not None:
        return "its head is not one plain matmul"
    for name, module in decoder.layers[0].named_modules():
        if isinstance(module, nn.Linear) and least_rows(module.weight, module.bias is not None) is None:
            return f"the product of {name} depends on the number of rows even above {MOST_PADDED} rows"
    return None


def make_exact(policy: Policy, engine: GraphedEngine) -> str | None:
    """Make engine and trainer of a policy exact; returns why they are not, None if they are."""
    joined = engine.joined
    try:
        reason = why_not_exact(policy)
        if reason is None:
            policy.exact = True
            engine.forget()
            reason = find_difference(engine, policy)
            if reason is not None and joined:
                # Joined products were equal on random numbers; if they are not here, separate ones may be.
                engine.joined = False
                reason = find_difference(engine, policy)
    except Exception as error:  # as without `exact`
        reason = describe_failure(error)
    policy.exact = reason is None
    engine.joined = engine.joined if policy.exact else joined
    engine.forget()
    return reason


def find_difference(engine: GraphedEngine, policy: Policy) -> str | None:
    """Sample with few and many rows and score by the trainer: where a bit differs; None if none does."""
    for rows in dict.fromkeys([*(few for few in _FEW_ROWS if few <= engine.rows_at_once), engine.rows_at_once]):
        requests, responses = _sample(engine, policy, rows)
        engine.forget()
        texts = _texts(requests, responses)
        parts = [torch.arange(first, min(first + _SCORED_AT_ONCE, rows)) for first in range(0, rows, _SCORED_AT_ONCE)]
        scored = torch.cat([policy.score(texts, part).logprobs.cpu() for part in parts])
        sampled = torch.stack([response.logprobs for row in responses for response in row])
        unequal = scored != sampled
        if not bool(unequal.any()):
            continue
        row = int(unequal.any(1).int().argmax())
        prompt = requests[int(texts.group[row])].prompt
        difference = first_difference(policy, prompt, texts.tokens[row], rows=rows, joined=engine.joined)
        where = "in no operation that the walk repeats" if difference is None else str(difference)
        return f"{int(unequal.sum())} of {unequal.numel()} log-probs differ at {rows} rows: {where}"
    return None


def _sample(engine: GraphedEngine, policy: Policy, rows: int) -> tuple[list[Request], list[list[Response]]]:
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(0, policy.vocabulary, (-(-rows // 2), _PROMPT), generator=generator)
    # Two responses to a prompt share its keys; the last prompt of an odd number of rows has one.
    requests = [
        Request(prompt=prompt[: 1 + 7 * place % _PROMPT], seeds=tuple(range(rows))[2 * place : 2 * place + 2])
        for place, prompt in enumerate(prompts)
    ]
    limits = Limits(max_response_tokens=_TOKENS, end_tokens=())
    return requests, engine.generate(requests, Sampling(), limits)


def _texts(requests: list[Request], responses: list[list[Response]]) -> Texts:
    tokens = torch.stack([response.tokens for row in responses for response in row])
    group = torch.repeat_interleave(torch.tensor([len(row) for row in responses]))
    return response_texts([request.prompt for request in requests], tokens, group)
