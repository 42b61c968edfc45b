"""The unchanged client of OpenAI against a server: OPENAI_BASE_URL and OPENAI_API_KEY name it. Prints JSON."""

import asyncio
import json
from typing import Any

import openai

MESSAGES: Any = [{"role": "user", "content": "add 2 and 3"}]


def check() -> dict[str, Any]:
    client = openai.OpenAI(max_retries=0)
    (model,) = [each.id for each in client.models.list()]
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, seed=1, n=2, logprobs=True, top_logprobs=3, stop=["zz"]
    )
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage is not None
    content = whole.choices[0].logprobs
    assert content is not None and content.content is not None and len(content.content[0].top_logprobs) == 3
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage is not None
    completion = client.completions.create(model=model, prompt="12+3=", max_tokens=4, seed=1, logprobs=2, echo=True)
    assert completion.choices[0].text.startswith("12+3=")
    ids = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=4, extra_body={"return_token_ids": True})
    for request, expected in (
        ({"model": "gpt-5", "prompt": "a"}, openai.NotFoundError),
        ({"model": model, "prompt": "a", "n": 10**6}, openai.BadRequestError),
        ({"model": model, "prompt": "a" * 10**6}, openai.BadRequestError),
    ):
        try:
            client.completions.create(**request)  # type: ignore[call-overload]
        except expected as error:
            assert error.body is not None
        else:
            raise AssertionError(request)
    try:
        openai.OpenAI(api_key="another", max_retries=0).models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")
    return {"text": text, "token_ids": ids.choices[0].token_ids, "different": asyncio.run(count_different(model))}  # type: ignore[attr-defined]


async def count_different(model: str) -> int:
    """How many of 64 requests at once, with a seed each, have a text of their own."""
    client = openai.AsyncOpenAI()
    requests = [
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20, seed=seed) for seed in range(64)
    ]
    return len({answer.choices[0].message.content for answer in await asyncio.gather(*requests)})


if __name__ == "__main__":
    print(json.dumps(check()))
