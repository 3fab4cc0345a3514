"""The HTTP interface: which routes there are, and how a request becomes an answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from surefoot import __version__
from surefoot.async_llm import AsyncLLM, AsyncStream
from surefoot.errors import EngineClosedError, PromptError
from surefoot.params import SamplingParams
from surefoot.server.gate import LIMITS, Gate, Limits
from surefoot.server.refusals import (
    CHAT_PATH,
    FAILED,
    STOPPED,
    Refused,
    add_handlers,
    failed,
    gone,
    unknown_model,
)
from surefoot.server.schema import ChatBody, CompletionBody, SamplingBody
from surefoot.server.shapes import (
    ChatShape,
    CompletionShape,
    Envelope,
    Json,
    Shape,
    Spelling,
    usage_entry,
)
from surefoot.server.stream import DONE, EventStream, event, unless_gone
from surefoot.text.messages import Message


def make_app(
    llm: AsyncLLM, name: str, api_key: str | None = None, limits: Limits = LIMITS
) -> FastAPI:
    """The application that serves one model.

    Args:
        llm: the model; whoever opened it closes it.
        name: what clients call it.
        api_key: what they must send to use it; None lets everybody.
        limits: what all of them together may hold.
    """
    service = _Service(llm, name)
    app = FastAPI(title="surefoot", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_key=api_key, limits=limits)
    add_handlers(app)
    for path, method, endpoint in (
        (CHAT_PATH, "POST", service.chat),
        ("/v1/completions", "POST", service.complete),
        ("/v1/models", "GET", service.models),
        ("/v1/models/{model:path}", "GET", service.model),
        ("/health", "GET", service.health),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


class _Service:
    """The endpoints of one model."""

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self._llm = llm
        self._name = name
        self._defaults = llm.default_params()
        self._spelling = Spelling(llm.tokenizer)
        self._begun = int(time.time())

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        self._check(body)
        params, messages = body.params(self._defaults), body.conversation()
        shape = ChatShape(self._spelling, params.logprobs)
        begin = self._begin_chat(messages, body.chat_template_kwargs, params)
        return await self._answer(body, request, shape, begin)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        self._check(body)
        params, prompts = body.params(self._defaults), body.prompts()
        shape = CompletionShape(self._spelling, params.logprobs)
        return await self._answer(body, request, shape, self._llm.submit(prompts, params))

    async def models(self) -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, model: str) -> Response:
        """What is known of a model."""
        if model != self._name:
            return unknown_model(model, self._name).reply()
        return JSONResponse(self._card())

    async def health(self) -> Response:
        """Whether requests can be served."""
        return JSONResponse({"status": "ok"}) if self._llm.alive else STOPPED.reply()

    def _check(self, body: SamplingBody) -> None:
        if body.model not in (None, self._name):
            raise Refused(unknown_model(str(body.model), self._name))

    def _card(self) -> Json:
        return {
            "id": self._name,
            "object": "model",
            "created": self._begun,
            "owned_by": "surefoot",
            "max_model_len": self._llm.max_model_len,
        }

    async def _begin_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], params: SamplingParams
    ) -> AsyncStream:
        if self._llm.engine.target.chat_format is None:
            raise PromptError("the model has no chat template; use /v1/completions")
        return await self._llm.submit_chat(messages, options, params)

    async def _answer(
        self,
        body: SamplingBody,
        request: Request,
        shape: Shape,
        begin: Coroutine[Any, Any, AsyncStream],
    ) -> Response:
        """Answer at once or piece by piece, as long as the client is there."""
        envelope = Envelope(shape, self._name)
        if not body.stream:
            reply = await unless_gone(request.receive, _whole(begin, shape, envelope))
            return gone() if reply is None else reply
        stream = await unless_gone(request.receive, begin)
        if stream is None:
            return gone()
        events = _events(stream, shape, envelope, body.include_usage)
        return EventStream(events, stream.close)


async def _whole(
    begin: Coroutine[Any, Any, AsyncStream], shape: Shape, envelope: Envelope
) -> Response:
    stream = await begin
    try:
        completions = await stream.completions()
    finally:
        stream.close()
    if any(failed(completion.finish_reason) for completion in completions):
        return FAILED.reply()
    choices = [shape.choice(completion) for completion in completions]
    count = sum(len(completion.token_ids) for completion in completions)
    return JSONResponse(envelope.whole(choices, _usage(stream, count)))


async def _events(
    stream: AsyncStream, shape: Shape, envelope: Envelope, include_usage: bool
) -> AsyncIterator[bytes]:
    """The events of a streamed answer; an error is the last event, and nothing follows it."""
    no_usage: dict[str, Json | None] = {"usage": None} if include_usage else {}
    count = 0
    for index in range(len(stream.prompts) * stream.params.n):
        opening = shape.opening(index)
        if opening is not None:
            yield event(envelope.chunk([opening], no_usage))
    try:
        async for piece in stream:
            count += len(piece.token_ids)
            if piece.finish_reason is not None and failed(piece.finish_reason):
                yield event(FAILED.entry())
                return
            if piece.text or piece.logprobs or piece.finish_reason is not None:
                yield event(envelope.chunk([shape.part(piece)], no_usage))
    except EngineClosedError:
        yield event(STOPPED.entry())
        return
    if include_usage:
        yield event(envelope.chunk([], {"usage": _usage(stream, count)}))
    yield DONE


def _usage(stream: AsyncStream, new_tokens: int) -> Json:
    prompt_tokens = sum(len(prompt) for prompt in stream.prompts)
    return usage_entry(prompt_tokens, sum(stream.cached_tokens), new_tokens)
