"""What a client is told when its call is refused or fails: OpenAI's shape of errors, with the HTTP status."""

from dataclasses import dataclass
from typing import Any

from treering.errors import ConfigError, InputError, StateError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal(Exception):  # noqa: N818 - not an error of the server
    """A call that is not answered; the text states the rule, the value and the fix."""

    status: int
    """HTTP status: 400 bad input, 401 no key, 404 unknown model or path, 413 too large, 500 the engine's error."""
    text: str


def refusal_of(error: BaseException) -> Refusal:
    """What a client is told of an error.

    Example:
        >>> refusal_of(InputError("a prompt holds at least one token")).status
        400
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError | ConfigError | UnsupportedError):
        return Refusal(400, str(error))
    if isinstance(error, StateError):
        return Refusal(503, str(error))
    return Refusal(500, f"{type(error).__name__}: {error}")


def as_json(refusal: Refusal) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.text, "type": kind, "code": refusal.status}}
