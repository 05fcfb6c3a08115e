"""The exception tree: four kinds of failure, each with an HTTP status and retry advice.

    BaltoroError                     status  retry
      UserError                      4xx     no         ConfigError, RequestError, ContextLengthError, WeightsError
      CapacityError                  429/503 later      QueueFull, PoolExhausted
      PeerError                      502/503 elsewhere  WorkerLost, TransferError, SandboxError
      InvariantError                 500     no, stop   LeakError, DigestMismatch, ShapeError

Invariants: every error that reaches a user says what to do; an InvariantError stops the worker, with the audit.
Not here: how an error looks in JSON (`server/`).
"""

from __future__ import annotations


class BaltoroError(Exception):
    """Root of the tree. `status` is the HTTP status, `can_retry` whether trying again can help."""

    status: int = 500
    can_retry: bool = False


class UserError(BaltoroError):
    """The caller's fault: the same request will fail again. `param` names the field at fault, if one is."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(UserError):
    """A configuration file, flag or model config that cannot be used."""


class WeightsError(UserError):
    """A checkpoint whose tensors are missing, unexpected or misshapen; the message names the tensor."""


class RequestError(UserError):
    """A request body, message list or sampling parameter that cannot be used."""


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit into the context."""


class CapacityError(BaltoroError):
    """No room now; later there may be."""

    status = 503
    can_retry = True


class QueueFull(CapacityError):
    """The waiting line is at its limit."""

    status = 429


class PoolExhausted(CapacityError):
    """No page or slot is free."""


class PeerError(BaltoroError):
    """Somebody else failed."""

    status = 502
    can_retry = True


class WorkerLost(PeerError):
    """The engine process died or does not answer."""

    status = 503


class TransferError(PeerError):
    """Bytes that were refused or did not come; `check` is the name of the check that says so."""

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class SandboxError(PeerError):
    """The sandbox itself failed or is not permitted here; a command that fails inside one is not an error."""


class InvariantError(BaltoroError):
    """Our bug. The worker stops."""


class LeakError(InvariantError):
    """Pages or slots do not add up; the message holds the difference."""


class DigestMismatch(InvariantError):
    """Bytes that are already in use are not those that were agreed on."""


class ShapeError(InvariantError):
    """Tensors that do not fit together were handed to a kernel or a layer."""
