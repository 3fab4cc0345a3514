"""The online front door: `AsyncLLM` serves many callers of an event loop with one engine thread.

The engine belongs to its thread alone. Callers hand work over through one queue, which the thread
empties between two steps; what a step emits goes back to the event loop of the stream it is for.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import Progress, silent
from surefoot.engine.rows import Emission
from surefoot.errors import EngineClosedError, PromptError, SettingError
from surefoot.llm import LLM, Prompt
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.results import Completion, Piece
from surefoot.text.messages import Message
from surefoot.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_STOPPED = "the engine has stopped; start it anew"


@dataclass(frozen=True)
class LivePiece(Piece):
    """A piece with what can only be read while the engine holds still.

    Attributes:
        logprobs: for each of the new tokens {token id: log-probability}; empty if not asked for.
        error: what went wrong if finish_reason is "error".
        cached_tokens: tokens of this sample's prompt that came from the prefix cache.
    """

    logprobs: tuple[dict[int, float], ...]
    error: str | None
    cached_tokens: int


class AsyncStream:
    """The pieces of all samples of one call, as they come. One task of its event loop reads it.

    It buffers at most what its requests can emit, which the context limits. Sample `s` of prompt
    `p` has the index p * n + s.

    Attributes:
        prompts: token ids of the prompts.
        params: how they are continued.
        cached_tokens: tokens of each prompt that came from the prefix cache, known with the first
            piece of its first sample.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        leave: Callable[[AsyncStream], None],
    ) -> None:
        """Make a stream in the running event loop; `leave` tells the engine to end its requests."""
        self.prompts = prompts
        self.params = params
        self.cached_tokens = [0] * len(prompts)
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._admitted: asyncio.Future[None] = self._loop.create_future()
        self._pieces: asyncio.Queue[LivePiece | EngineClosedError] = asyncio.Queue()
        self._open = len(prompts) * params.n

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    async def __anext__(self) -> LivePiece:
        """The next piece of any sample.

        Raises:
            EngineClosedError: the engine stopped before the end.
        """
        if not self._open:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, EngineClosedError):
            self._open = 0
            raise piece
        self._open -= piece.finish_reason is not None
        prompt, sample = divmod(piece.index, self.params.n)
        if not sample:
            self.cached_tokens[prompt] = piece.cached_tokens
        return piece

    async def completions(self) -> list[Completion]:
        """All samples in the order of their indices, once each has ended.

        Raises:
            EngineClosedError: the engine stopped before the end.
        """
        gathered: list[list[LivePiece]] = [[] for _ in range(self._open)]
        async for piece in self:
            gathered[piece.index].append(piece)
        wanted = self.params.logprobs is not None
        return [_completion(pieces, wanted) for pieces in gathered]

    def close(self) -> None:
        """End what still runs; pieces on their way are dropped. May be called again."""
        if self._open:
            self._open = 0
            self._leave(self)

    async def admitted(self) -> None:
        """Wait until the engine has taken all prompts in, or refused them.

        Raises:
            SettingError: as `Engine.submit`.
            EngineClosedError: the engine has stopped.
        """
        await self._admitted

    def resolve(self, refusal: Exception | None) -> None:
        """From the engine thread: the prompts were taken in, or refused for this reason."""
        self._soon(partial(self._resolve, refusal))

    def deliver(self, pieces: Sequence[LivePiece | EngineClosedError]) -> None:
        """From the engine thread: some more pieces, or that none will come."""
        self._soon(partial(self._put, pieces))

    def _resolve(self, refusal: Exception | None) -> None:
        if self._admitted.done():
            return
        if refusal is None:
            self._admitted.set_result(None)
        else:
            self._open = 0
            self._admitted.set_exception(refusal)

    def _put(self, pieces: Sequence[LivePiece | EngineClosedError]) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    def _soon(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            # The event loop was closed: nobody reads, so the engine shall not run on for nobody.
            self._leave(self)


class AsyncLLM:
    """A model that serves many tasks of an event loop at once. Call `close()` at the end.

    Example:
        stream = await llm.submit(["The capital of France is"], llm.default_params())
        async for piece in stream:
            print(piece.text)
    """

    def __init__(self, engine: Engine) -> None:
        """Start the thread that owns `engine` from now on, and closes it in the end."""
        self.engine = engine
        self.max_model_len = engine.parts.max_model_len
        self._front = LLM.on(engine)
        self._coming = 0
        self._driver = _Driver(engine)
        self._thread = threading.Thread(target=self._driver.run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, model: str, *, progress: Progress = silent, **settings: object) -> Self:
        """Load `model`; arguments and errors are those of `LLM`."""
        return cls(Engine.open(model, make_config(**settings), progress))

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return not self._driver.closed

    @property
    def failure(self) -> Exception | None:
        """What ended the engine, if it was not `close()`."""
        return self._driver.failure

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.engine.tokenizer

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), else greedy."""
        return self._front.default_params()

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams) -> AsyncStream:
        """Begin to continue prompts; all of them are taken in, or none.

        Args:
            prompts: texts or token ids.
            params: for each of them.

        Raises:
            PromptError: a prompt that cannot be served.
            SettingError: sampling values that do not suit the model; the parameter is
                "max_waiting" if as many requests wait already as may wait.
            EngineClosedError: the engine has stopped.
        """
        return await self._begin(len(prompts), partial(self._encode, prompts), params)

    async def submit_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], params: SamplingParams
    ) -> AsyncStream:
        """Begin to answer a conversation; raises as `submit` and `LLM.render_chat`.

        Args:
            messages: the conversation.
            options: further variables for the chat template.
            params: how to continue.
        """
        return await self._begin(1, lambda: [self._front.render_chat(messages, options)], params)

    async def _begin(
        self, count: int, encode: Callable[[], list[Prompt]], params: SamplingParams
    ) -> AsyncStream:
        """Keep places for `count` prompts, then have a thread make them, then hand them over."""
        samples, most = count * params.n, self.engine.config.max_waiting
        if samples > most:
            raise PromptError(f"asks for {samples} samples at once, more than max_waiting {most}")
        if self._coming + samples > most:
            raise SettingError("max_waiting", f"{most} requests wait already; try again later")
        self._coming += samples
        try:
            return await self._hand_over(await asyncio.to_thread(encode), params)
        finally:
            self._coming -= samples

    def close(self) -> None:
        """End all requests, stop the thread and give the memory back. May be called again."""
        self._driver.post(self._driver.stop)
        self._thread.join()

    def _encode(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return list(prompts)  # the engine refuses texts, with its reason
        return [
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    async def _hand_over(self, prompts: Sequence[Prompt], params: SamplingParams) -> AsyncStream:
        stream = AsyncStream(prompts, params, self._leave)
        if not self._driver.post(partial(self._driver.admit, stream)):
            raise EngineClosedError(_STOPPED)
        try:
            await stream.admitted()
        except BaseException:
            stream.close()
            raise
        return stream

    def _leave(self, stream: AsyncStream) -> None:
        self._driver.post(partial(self._driver.abort, stream))


class _Driver:
    """What the engine thread does. Other threads may call `post` and read the attributes.

    Attributes:
        closed: whether nothing is taken in any more.
        failure: the exception that ended the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.closed = False
        self.failure: Exception | None = None
        self._engine = engine
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[AsyncStream, list[Request]] = {}
        self._places: dict[Request, tuple[AsyncStream, int]] = {}
        self._stopping = False

    def post(self, work: Callable[[], None]) -> bool:
        """Have the engine thread do `work` between two steps; False if it has stopped."""
        with self._lock:
            if not self.closed:
                self._inbox.put(work)
            return not self.closed

    def run(self) -> None:
        """Serve until stopped; the thread's whole life."""
        try:
            while not self._stopping:
                self._serve()
            for stream in list(self._requests):
                self._fail(stream)
        except Exception as error:
            log.exception("the engine has stopped")
            self.failure = error
        finally:
            self._retire()

    def stop(self) -> None:
        """Work: end the thread."""
        self._stopping = True

    def admit(self, stream: AsyncStream) -> None:
        """Work: take in all prompts of a stream, or none."""
        requests: list[Request] = []
        try:
            for prompt in stream.prompts:
                requests.extend(self._engine.submit(prompt, stream.params))
        except Exception as error:  # a bug met by one request shall not end the others
            for request in reversed(requests):
                self._engine.abort(request)
            stream.resolve(error)
            return
        self._requests[stream] = requests
        self._places |= {request: (stream, at) for at, request in enumerate(requests)}
        stream.resolve(None)

    def abort(self, stream: AsyncStream) -> None:
        """Work: end what still runs of a stream."""
        for request in self._requests.pop(stream, ()):
            if self._places.pop(request, None) is not None:
                self._engine.abort(request)

    def _serve(self) -> None:
        """Do what was asked for, then a step; waits while there is nothing to do."""
        if self._engine.idle:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        if not self._stopping:
            self._hand_out(self._engine.step())

    def _hand_out(self, emissions: Sequence[Emission]) -> None:
        pieces: dict[AsyncStream, list[LivePiece]] = {}
        for emission in emissions:
            stream, index = self._places[emission.request]
            pieces.setdefault(stream, []).append(_piece(emission, index))
            if emission.reason is not None:
                self._forget(emission.request, stream)
        for stream, fresh in pieces.items():
            stream.deliver(fresh)

    def _forget(self, request: Request, stream: AsyncStream) -> None:
        del self._places[request]
        if not any(other in self._places for other in self._requests[stream]):
            del self._requests[stream]

    def _fail(self, stream: AsyncStream) -> None:
        self.abort(stream)
        stream.deliver([EngineClosedError(_STOPPED)])

    def _retire(self) -> None:
        """Let nobody wait for an engine that has stopped."""
        with self._lock:
            self.closed = True
        self._engine.close()
        for stream in self._requests:
            stream.deliver([EngineClosedError(_STOPPED)])
        self._requests.clear()
        while not self._inbox.empty():
            self._inbox.get()()


def _piece(emission: Emission, index: int) -> LivePiece:
    request, count = emission.request, len(emission.token_ids)
    wanted = request.params.logprobs is not None and count
    return LivePiece(
        index=index,
        text=emission.text,
        token_ids=tuple(emission.token_ids),
        finish_reason=None if emission.reason is None else emission.reason.value,
        logprobs=tuple(request.logprobs[-count:]) if wanted else (),
        error=request.error,
        cached_tokens=request.cached_tokens,
    )


def _completion(pieces: Sequence[LivePiece], with_logprobs: bool) -> Completion:
    last = pieces[-1]
    assert last.finish_reason is not None, "only ended samples become completions"
    logprobs = tuple(entry for piece in pieces for entry in piece.logprobs)
    return Completion(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason,
        logprobs=logprobs if with_logprobs else None,
        error=last.error,
    )
