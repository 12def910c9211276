"""Errors as OpenAI's API writes them. Errors of the library are known by name, so that none needs to be loaded."""

from __future__ import annotations

from typing import Any, NamedTuple


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: of HTTP. message: what was found, what is expected, and what to do.
        kind: OpenAI's word for the class of errors. code: what programs compare. param: the field that is meant.
        retry_s: seconds after which the same request may succeed; None where it will not.
    """

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, retry_s: int | None = None):
        super().__init__(message)
        self.status, self.kind, self.code, self.param, self.retry_s = status, kind, code, param, retry_s

    def __reduce__(self) -> Any:
        fields = {"kind": self.kind, "code": self.code, "param": self.param, "retry_s": self.retry_s}
        return _again, (self.status, str(self), fields)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def _again(status: int, message: str, fields: dict[str, Any]) -> ApiError:
    return ApiError(status, message, **fields)


class _As(NamedTuple):
    status: int
    kind: str
    code: str | None
    retry_s: int | None = None


_TABLE = {  # the first of an error's classes that is here counts
    "NoSlot": _As(503, "server_error", "no_slot", 1),
    "ContextBusy": _As(409, "conflict", "session_busy", 1),
    "ContextClosed": _As(503, "server_error", "shutting_down", 2),
    "StaleOwner": _As(409, "conflict", "stale_owner", 0),
    "StateLost": _As(409, "conflict", "state_lost"),
    "SnapshotNotFound": _As(404, "invalid_request_error", "not_found"),
    "SnapshotMismatch": _As(409, "conflict", "snapshot_mismatch"),
    "SnapshotCorrupt": _As(409, "conflict", "snapshot_corrupt"),
    "StoreError": _As(503, "server_error", "store_unavailable", 5),
    "BudgetExceeded": _As(400, "invalid_request_error", "budget_exceeded"),
    "InputError": _As(400, "invalid_request_error", None),
    "ConfigError": _As(400, "invalid_request_error", None),
    "LocretError": _As(500, "server_error", None),
    "TimeoutError": _As(504, "server_error", "timeout", 1),
}


def api_error(error: BaseException) -> ApiError:
    """The refusal that an error becomes. What nobody expected is told as "internal error", without its text."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if (row := _TABLE.get(kind.__name__)) is not None:
            return ApiError(row.status, str(error), kind=row.kind, code=row.code, retry_s=row.retry_s)
    return ApiError(500, "internal error; the server's log has it", kind="server_error", code="internal_error")
