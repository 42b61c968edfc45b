"""What the answers of all endpoints have in common: fields that change nothing, counts, versions, scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from legato.rollouts.scoring import TextScores
from legato.serve.errors import ApiError
from legato.serve.generation import Sample
from legato.serve.logprobs import Alternative, alternatives, own_only
from legato.serve.served import Served
from legato.serve.values import Body


def ignore_usual(body: Body) -> None:
    """Accept fields that change no response on this server, and refuse values that would have to."""
    body.ignore("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
    body.ignore("prompt_cache_retention", "session_id", "cache_salt", "kv_transfer_params", "ec_transfer_params")
    body.only("use_beam_search", False, advice="expected false or nothing")
    body.only("length_penalty", 1, advice="it belongs to beam search")
    body.only("truncate_prompt_tokens", advice="shorten the prompt yourself")
    body.only("priority", 0, advice="requests are served in the order of their arrival")
    body.only("response_format", {"type": "text"}, advice="responses are plain text")


def read_usage(body: Body, stream: bool) -> bool:
    """Whether a stream is to end with the numbers of tokens."""
    if body.raw("stream_options") is None:
        return False
    if not stream:
        raise ApiError(400, "expected stream_options only with stream = true", param="stream_options")
    options = Body(body.table("stream_options"), "stream_options.")
    wanted = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.refuse_unknown()
    return wanted


def count_usage(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> dict[str, int]:
    """How many tokens were read and written."""
    read, written = sum(map(len, prompts)), sum(len(sample.tokens) for sample in samples)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def version_spans(served: Served, sample: Sample) -> list[dict[str, Any]]:
    """The versions of the weights that sampled the tokens of a response, as vLLM writes them."""
    return [
        {"version": span.version, "start": span.start, "end": span.end} for span in served.weights.spans(sample.versions)
    ]


def fingerprint(served: Served) -> str:
    """OpenAI's name for the state of the server that answered: the version of the weights."""
    return f"legato-{served.weights.name}"


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a prompt, if they are wanted, and each token of a sample with its alternatives."""

    prompt: TextScores | None
    places: list[list[Alternative]]


async def score_samples(
    served: Served, samples: Sequence[Sample], *, prompts: int | None, others: int, wanted: bool = True
) -> list[Scored]:
    """The scores of samples with `others` alternatives to each token; `prompts`: as many to each prompt token, None: none.

    No forward pass is needed if neither is wanted: the engine reports the log-probs of its own tokens. `wanted` False: those
    are not needed here.
    """
    temperature = samples[0].asked.sampling.temperature or 1.0
    whole: list[tuple[int, TextScores]] = []
    if others:
        texts = [sample.prompt + sample.tokens for sample in samples]
        whole = await served.score(texts, temperature, max(others, prompts or 0), param="prompt")
    of_prompts: dict[int, TextScores] = {}
    if prompts is not None and not (whole and temperature == 1.0):
        different = {id(sample.prompt): sample.prompt for sample in samples}
        scores = await served.score(list(different.values()), 1.0, prompts, param="prompt")
        of_prompts = {name: each for name, (_, each) in zip(different, scores, strict=True)}
    scored = []
    for place, sample in enumerate(samples):
        of_prompt = of_prompts.get(id(sample.prompt), whole[place][1] if whole and prompts is not None else None)
        if not whole:
            scored.append(Scored(of_prompt, own_only(sample.tokens, sample.logprobs) if wanted else []))
            continue
        version, of_text = whole[place]
        known = [each == version for each in sample.versions]
        start = len(sample.prompt) - 1
        places = alternatives(of_text, start, sample.tokens, sample.logprobs, others, known)
        scored.append(Scored(of_prompt, places))
    return scored
