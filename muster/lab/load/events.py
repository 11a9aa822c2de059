"""Server-sent events, from bytes cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator


class Events:
    """Finds the data of each event.

    Only line feeds and carriage returns end a line: text in JSON may hold other separators of lines.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Takes the next bytes; the data of every event that is whole now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
