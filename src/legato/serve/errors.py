"""Answers to requests that cannot be served, in the shape of OpenAI's API.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": null}}
"""

from collections.abc import Mapping
from typing import Any

from legato.errors import describe_value


class ApiError(Exception):
    """A request that is answered with an error: its status, and the body that names what is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's name for this kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_value(param: str, expected: str, value: object) -> ApiError:
    """The error about a field with a value that is not allowed."""
    return ApiError(400, f"expected {expected}, got {describe_value(value)} ({param})", param=param)


def unsupported(param: str, advice: str) -> ApiError:
    """The error about a field that this server cannot honour."""
    return ApiError(400, f"{param} is not supported by this server: {advice}", param=param, code="unsupported_parameter")


def whole_answers_only(streams: str) -> ApiError:
    """The error about a stream of what is known only at its end; `streams` is the setting of log-probs that would stream."""
    return ApiError(
        400,
        "expected stream = false where alternatives or scores of the prompt are wanted, got true (stream);"
        f" {streams} streams",
        param="stream",
        code="unsupported_parameter",
    )


def context_exceeded(param: str, tokens: int, most: int) -> ApiError:
    """The error about a prompt that, with its response, has more tokens than the server allows."""
    return ApiError(
        400,
        f"This model's maximum context length is {most} tokens, got {tokens} ({param}); shorten the prompt or lower"
        " max_tokens",
        param=param,
        code="context_length_exceeded",
    )
