"""Errors in JSON: the one table from the exception tree to OpenAI's error object.

In: an exception. Out: HTTP status, headers and an `ErrorBody`.
Invariants: every reply that is no success has this shape; a caller's fault is 400 and never the framework's 422; the
words of an internal error do not leave the process.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from baltoro.errors import BaltoroError, CapacityError, InvariantError, QueueFull, RequestError, UserError, WorkerLost
from baltoro.observe import log, logger
from baltoro.protocol.openai_reply import ErrorBody, ErrorInfo, to_json

RETRY_AFTER_S = 1
# The client is gone: nobody reads this, logs do (the number is nginx's).
CLIENT_GONE = 499


class Unauthorized(UserError):
    """No key, or a wrong one."""

    status = 401


class NotFound(UserError):
    """A model or a path that is not here."""

    status = 404


class BodyTooLarge(RequestError):
    """More bytes than the server reads."""

    status = 413


class ClientGone(BaltoroError):
    """The client closed the connection; its request was aborted."""

    status = CLIENT_GONE


# The first class that fits names the kind. OpenAI's words where it has one.
_KINDS: tuple[tuple[type[BaltoroError], str], ...] = (
    (Unauthorized, "authentication_error"),
    (NotFound, "not_found_error"),
    (UserError, "invalid_request_error"),
    (QueueFull, "rate_limit_error"),
    (CapacityError, "overloaded_error"),
    (WorkerLost, "service_unavailable"),
)
_STATUS_KINDS = {404: "not_found_error", 405: "invalid_request_error"}


def error_body(error: BaltoroError) -> ErrorBody:
    """The error object of an exception of the tree."""
    kind = next((name for fits, name in _KINDS if isinstance(error, fits)), "server_error")
    code = getattr(error, "code", None)
    message = "internal error; the server's log has the details" if isinstance(error, InvariantError) else str(error)
    return ErrorBody(ErrorInfo(message=message, type=kind, param=getattr(error, "param", None), code=code))


def error_response(error: BaltoroError) -> Response:
    """The HTTP reply to an exception of the tree."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.can_retry else {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return _json(error_body(error), error.status, headers)


def install(app: FastAPI) -> None:
    """Send every error of `app` in the one shape."""

    async def on_ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, BaltoroError)
        if error.status >= 500:
            log(logger("server"), "request failed", error=repr(error))
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path}: {error.detail}; /docs lists what is here"
        kind = _STATUS_KINDS.get(error.status_code, "invalid_request_error")
        return _json(ErrorBody(ErrorInfo(message=text, type=kind)), error.status_code, dict(error.headers or {}))

    async def on_bug(_: Request, __: Exception) -> Response:
        return error_response(InvariantError())

    app.add_exception_handler(BaltoroError, on_ours)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _json(body: ErrorBody, status: int, headers: dict[str, str]) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")
