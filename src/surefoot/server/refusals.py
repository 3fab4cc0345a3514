"""Errors as clients see them: {"error": {"message", "type", "param", "code"}} with a status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from surefoot.errors import EngineClosedError, SettingError
from surefoot.request import FinishReason

CHAT_PATH = "/v1/chat/completions"

_INVALID, _BROKEN = "invalid_request_error", "server_error"
_CHAT_NAMES = {"prompt": "messages", "template_options": "chat_template_kwargs"}
_UNAVAILABLE = "service_unavailable"
_RETRY = {"Retry-After": "1"}
_CLOSE = {"Connection": "close"}
"""For replies to a request whose body is not read to its end."""
_SHOWN = 60
"""Characters of a wrong value that are shown."""


@dataclass(frozen=True)
class Refusal:
    """Why a request got no answer, or no whole one.

    Attributes:
        status: of HTTP.
        message: what was wanted, what came, what to do.
        type: the class of the error, in OpenAI's words.
        param: the field at fault.
        code: a word for programs.
        headers: further headers of the reply.
    """

    status: int
    message: str
    type: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def entry(self) -> dict[str, object]:
        """The JSON object."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def reply(self) -> Response:
        """The whole reply. It may echo what the client sent, so it keeps to ASCII."""
        return Response(
            json.dumps(self.entry()), self.status, dict(self.headers), "application/json"
        )


class Refused(HTTPException):
    """Carries a refusal out of wherever it is found, also from under the parser of bodies."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.status, refusal.message)
        self.refusal = refusal


STOPPED = Refusal(
    503, "the engine has stopped; start the server anew", _UNAVAILABLE, code="stopped"
)
FAILED = Refusal(
    500, "the engine failed on this request; the server's log says why", _BROKEN, code="failed"
)
_BUG = Refusal(500, "the server failed; its log says why", _BROKEN)
_GONE = Refusal(499, "the client has left")


def gone() -> Response:
    """A reply that nobody reads."""
    return _GONE.reply()


def failed(reason: str) -> bool:
    """Whether a sample that ended for this reason has no whole answer."""
    return reason in (FinishReason.ERROR, FinishReason.ABORT)


def unknown_model(wanted: str, served: str) -> Refusal:
    """The client asked for another model than the one that is served."""
    message = f"model: {wanted!r} is not served here; ask for {served!r}"
    return Refusal(404, message, param="model", code="model_not_found")


def too_large(limit: int) -> Refusal:
    """The body has more bytes than are read."""
    message = f"the body is larger than {limit:,} bytes; send less"
    return Refusal(413, message, code="request_too_large")


def too_slow(seconds: float) -> Refusal:
    """The body does not come."""
    message = f"the body was not there after {seconds:g} s; send it faster, or less of it"
    return Refusal(408, message, code="request_timeout", headers=_CLOSE)


def too_many(limit: int) -> Refusal:
    """As many requests are open as may be."""
    message = f"{limit:,} requests are open, as many as may be; try again later"
    return Refusal(503, message, _UNAVAILABLE, code="overloaded", headers=_RETRY)


def too_much(limit: int) -> Refusal:
    """The bodies of all open requests have more bytes than are kept."""
    message = f"the open requests have more than {limit:,} bytes together; try again later"
    headers = {**_RETRY, **_CLOSE}
    return Refusal(503, message, _UNAVAILABLE, code="overloaded", headers=headers)


def unauthorised() -> Refusal:
    """The key is absent or wrong."""
    message = "the API key is absent or wrong; send the header 'Authorization: Bearer KEY'"
    headers = {"WWW-Authenticate": "Bearer"}
    return Refusal(401, message, "authentication_error", code="invalid_api_key", headers=headers)


def add_handlers(app: FastAPI) -> None:
    """Have every error of `app` answered in this one shape."""
    app.add_exception_handler(SettingError, _on_setting)
    app.add_exception_handler(EngineClosedError, _on_closed)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)


async def _on_setting(request: Request, error: Exception) -> Response:
    assert isinstance(error, SettingError)
    if error.parameter == "max_waiting":
        return Refusal(
            429,
            str(error),
            "rate_limit_error",
            code="queue_full",
            headers=_RETRY,
        ).reply()
    names = _CHAT_NAMES if request.url.path == CHAT_PATH else {}
    param = names.get(error.parameter, error.parameter)
    reason = str(error).removeprefix(f"{error.parameter}: ")
    return Refusal(400, f"{param}: {reason}", param=param).reply()


async def _on_closed(_request: Request, _error: Exception) -> Response:
    return STOPPED.reply()


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    first = problems[0]
    where = first["loc"][1:]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['ctx']['error']}").reply()
    if not where:
        return Refusal(400, _no_object(request)).reply()
    alike = [problem for problem in problems if problem["loc"][:2] == first["loc"][:2]]
    if len(alike) > 1 and _is_kind(alike[0]) and _is_kind(alike[-1]):
        # None of the kinds that the field may have; each complains in its own words.
        wanted = " or ".join(dict.fromkeys(_wanted(problem) for problem in alike))
        reason, where = f"must be {wanted}, not {_shown(error.body[where[0]])}", where[:1]
    else:
        reason = _reason(first)
    param = _path(where)
    return Refusal(400, f"{param}: {reason}", param=param).reply()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refused):
        return error.refusal.reply()
    if error.status_code in (404, 405):
        message = f"there is no {request.method} {request.url.path!r} here"
        return Refusal(error.status_code, message, code="unknown_url").reply()
    return Refusal(error.status_code, error.detail).reply()


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return _BUG.reply()


def _no_object(request: Request) -> str:
    kind = request.headers.get("content-type", "")
    if "json" not in kind:
        return "the body must be JSON; send it with the header 'Content-Type: application/json'"
    return "the body must be a JSON object"


def _path(where: Sequence[object]) -> str:
    """A place in the body as it is written in code: messages[0].role."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return "".join(parts).removeprefix(".")


def _is_kind(problem: Mapping[str, Any]) -> bool:
    """Whether the place of a problem goes on with the kind that was tried: prompt.list[int]."""
    kind = str(problem["loc"][2]) if len(problem["loc"]) > 2 else ""
    return kind == "str" or kind.startswith("list[")


def _reason(problem: Mapping[str, Any]) -> str:
    match problem["type"]:
        case "extra_forbidden":
            return "is not a field that this server knows; leave it out"
        case "missing":
            return "is required"
    return f"must be {_wanted(problem)}, not {_shown(problem['input'])}"


def _wanted(problem: Mapping[str, Any]) -> str:
    return str(problem["msg"]).removeprefix("Input should be ")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
