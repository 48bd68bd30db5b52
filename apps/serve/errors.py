"""Errors in the API's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge.errors import ContextFullError, EdgeError, InputError, TokenizerError

MAX_MESSAGE = 2000  # characters: messages quote what clients sent


class ApiError(Exception):
    """The refusal of a request, or its failure.

    Attributes:
        status: HTTP status. code: error code for programs. param: field at fault, or None.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        if len(message) > MAX_MESSAGE:
            self.message = message[:MAX_MESSAGE].rpartition(" ")[0] + " …"
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return the refusal of a parameter."""
    return ApiError(400, message, code=code or "invalid_value", param=param)


def busy(message: str, code: str, retry_s: int, status: int = 503) -> ApiError:
    """Return a temporary refusal: the same request may be sent again after `retry_s` seconds."""
    return ApiError(status, message, code=code, headers={"retry-after": str(retry_s)})


def too_late(message: str) -> ApiError:
    """Return the error of a deadline that passed with no output; clients should not retry."""
    return ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})


def stopping() -> ApiError:
    return busy("the server is shutting down", "shutting_down", 5)


def internal() -> ApiError:
    """Return the error of a bug in the server; the log has the details."""
    return ApiError(500, "the server failed; see its log", code="internal_error")


def of_edge_error(problem: EdgeError) -> ApiError:
    """Convert the runtime's refusal to the API's. Paths of this machine are left out."""
    message = f"{problem.message} ({problem.remedy})" if problem.remedy else problem.message
    if isinstance(problem, ContextFullError):
        return ApiError(400, message, code="context_length_exceeded", param=problem.field)
    if isinstance(problem, InputError):
        field = problem.field
        return invalid(f"{field}: {message}" if field else message, field)
    if isinstance(problem, TokenizerError):
        if str(problem.file).endswith((".json", ".model")):
            return ApiError(400, f"tokenizer: {message}", code="tokenizer", param="messages")
        # a template that cannot render this conversation can often render another
        return ApiError(400, f"chat template: {message}", code="chat_template", param="messages")
    return ApiError(500, message, code="engine_error")


def encode(payload: Any) -> bytes:
    """Encode JSON on one line. Lone surrogates, which errors may quote, become `?`."""
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
