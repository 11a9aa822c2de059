"""What the engine's thread has made and a client has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from muster.engine.request import Request, RequestOutput, TokenLogprob
from muster.errors import MusterError


@dataclass
class Piece:
    """News of one answer since the piece before; all pieces of an answer together are the answer.

    Attributes:
        index: which of the answers to one prompt list it belongs to.
        text: new text.
        token_ids: new ids.
        logprobs: of the new ids, if they were asked for.
        output: the whole answer, with its last piece.
        failure: why it ended, when `output` says "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output: RequestOutput | None = None
    failure: MusterError | None = None

    def extend(self, later: Piece) -> None:
        """Takes in the piece that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.output, self.failure = later.output, later.failure


@dataclass
class Cursor:
    """How much of a request has been told, however many tokens a step gave it.

    Attributes:
        request: of the engine.
        index: which answer it is.
        last: when its newest token came, in seconds of `time.perf_counter`; None before the first.
    """

    request: Request
    index: int
    last: float | None = None
    _tokens: int = 0
    _logprobs: int = 0

    def piece(self) -> Piece:
        """What is new since the last call."""
        request = self.request
        answer, logprobs = request.answer[self._tokens :], request.logprobs[self._logprobs :]
        self._tokens += len(answer)
        self._logprobs += len(logprobs)
        output = request.output() if request.finish_reason is not None else None
        return Piece(self.index, request.news(), answer, logprobs, output, request.failure)


class Mailbox:
    """Pieces for one client, joined per answer while they wait: a slow reader costs no more than its answer's size.

    For the event loop's thread alone.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Piece] = {}
        self._failure: MusterError | None = None
        self._news = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Leaves a piece."""
        if piece.index in self._waiting:
            self._waiting[piece.index].extend(piece)
        else:
            self._waiting[piece.index] = piece
        self._news.set()

    def fail(self, failure: MusterError) -> None:
        """Nothing more will come, for this reason."""
        self._failure = failure
        self._news.set()

    async def pieces(self, answers: int) -> AsyncIterator[Piece]:
        """Every piece until all `answers` have ended.

        Raises:
            MusterError: why nothing more will come.
        """
        while answers:
            await self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            for piece in waiting.values():
                answers -= piece.output is not None
                yield piece
            if self._failure is not None:
                raise self._failure
