"""What a client gets instead of an answer: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster.errors import InputError, MusterError, NumericsError, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
LONGEST = 400
"""Characters of what was found that a client gets back."""


@dataclass(frozen=True)
class Refused:
    """An error as a client sees it.

    Attributes:
        status: of HTTP.
        body: the JSON object `{"error": ...}`.
        headers: besides the usual ones.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


class RefusalError(MusterError):
    """A request that is not served for a reason of HTTP: its size, its key, the queue, the server's state.

    Args:
        status: of HTTP.
        code: one word for programs.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        code: str,
        thing: str,
        *,
        found: str = "",
        expected: str = "",
        hint: str = "",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(thing, found=found, expected=expected, hint=hint)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def refuse(error: MusterError, request_id: str) -> Refused:
    """The answer to a request that ended with this error; of what is not the client's fault it tells no details."""
    if isinstance(error, RefusalError):
        headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
        headers |= {"www-authenticate": "Bearer"} if error.status == 401 else {}
        return Refused(error.status, _object(error, error.status, error.code), headers)
    if isinstance(error, RequestError):
        return Refused(400, _object(error, 400, "invalid_value"), {})
    if isinstance(error, NumericsError):
        return Refused(500, _object(error, 500, "numerics"), {})
    if isinstance(error, InputError):
        return refuse(RequestError("this request", expected="what the served checkpoint can answer"), request_id)
    return internal(request_id)


def internal(request_id: str) -> Refused:
    """The answer when the server itself is at fault."""
    error = MusterError("internal error", hint=f"the server's log says more under request id {request_id}")
    return Refused(500, _object(error, 500, "internal_error"), {})


def _object(error: MusterError, status: int, code: str) -> dict[str, Any]:
    reasons: Sequence[MusterError] = error.reasons or (error,)
    return {
        "error": {
            "message": _plain(str(error), 4 * LONGEST),
            "type": _TYPES[status],
            "param": _plain(reasons[0].thing) if status == 400 else None,
            "code": code,
            "reasons": [
                {
                    "param": _plain(reason.thing),
                    "found": _plain(reason.found),
                    "expected": _plain(reason.expected, 4 * LONGEST),
                    "hint": _plain(reason.hint),
                }
                for reason in reasons
            ],
        }
    }


def _plain(text: str, longest: int = LONGEST) -> str:
    """Text that every client can decode, cut to a length."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
