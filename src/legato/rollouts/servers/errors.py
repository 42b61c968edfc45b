"""What can go wrong between a client and a server, by what the client should do about it."""

from legato.errors import InputError


class ServerError(Exception):
    """A request to a server that gave no usable answer."""

    retry: bool = True
    """Whether the same request may succeed later, or at another server."""


class UnreachableError(ServerError):
    """No answer: refused, reset, closed in the middle, or none in time."""


class FailedError(ServerError):
    """The server answered that it failed (5xx)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


class BusyError(ServerError):
    """The server has too much to do (429, 408): wait, then ask again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """How long the server asks to wait."""


class RefusedError(ServerError):
    """The server refused the request (4xx). Asking again does not help."""

    retry = False

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status, self.message = status, message


class BadReplyError(ServerError):
    """The answer is not what was asked for: no JSON, fields missing, tokens or log-probs that cannot be."""


class TooManyFilesError(InputError):
    """This process may not open another connection. That says nothing of the server, and no server would do better."""
