"""Text is a stream of tokens cut anywhere: characters split over tokens, stop strings split over both. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_WINDOW = 8

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Lets text through up to the first stop string, and never any part of one.

    The stop string that is complete first wins; of two complete at the same character, the longer. What comes out
    does not depend on how the text is cut into pushes.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can no longer become part of a stop string, and the stop string if one is now complete."""
        if not self._strings:
            return text, None
        text = self._held + text
        hits = [(start + len(stop), start, stop) for stop in self._strings if (start := text.find(stop)) >= 0]
        if hits:
            _, start, stop = min(hits)
            self._held = ""
            return text[:start], stop
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def close(self) -> str:
        """The text held back, when nothing can follow any more."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = max(map(len, self._strings)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._strings):
                return length
        return 0


class TextStream:
    """Tokens in, text out, one token at a time, so that no way of grouping them changes the text.

    New text is what a decoded window of recent tokens says beyond what it said before. The window begins and ends
    between characters, so that bytes are never judged without the others of their character.

    Args:
        decode: ids to text, special tokens left out; None when there is no tokenizer, then the text stays empty.
        context: the tokens before the answer; the last ones decide whether its first word starts with a space.
        stop: stop strings.

    Attributes:
        text: all that has come out. It only grows.
    """

    def __init__(self, decode: Decode | None, context: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.text = ""
        self._decode = decode
        self._origin = (context, stop)
        self._stop = StopStrings(stop)
        self._window: list[int] = []
        self._shown = ""
        self._recent = 0
        self._held: list[int] = []
        if decode is not None and context:
            self._look_back(decode, context)

    def push(self, token_id: int) -> str | None:
        """Takes the next token; the stop string it completes, or None."""
        if self._decode is None:
            return None
        self._held.append(token_id)
        seen = self._decode(self._window + self._held)
        if seen.endswith(_INCOMPLETE):
            return None
        if seen == self._shown and seen:
            self._held.clear()
            return None
        return self._show(seen)

    def replay(self, token_ids: Sequence[int]) -> TextStream:
        """A stream as this one would be after these tokens and no others."""
        stream = TextStream(self._decode, *self._origin)
        for token_id in token_ids:
            stream.push(token_id)
        return stream

    def close(self) -> str | None:
        """Lets out what was held back; the stop string that completes, or None."""
        stop = None
        if self._decode is not None and self._held:
            stop = self._show(self._decode(self._window + self._held))
        if stop is None:
            self.text += self._stop.close()
        return stop

    def _look_back(self, decode: Decode, context: Sequence[int]) -> None:
        """Starts the window with the end of the context, long enough not to begin inside a character."""
        length = _WINDOW
        while _INCOMPLETE in decode(context[-length:]) and length < len(context):
            length *= 2
        self._window = list(context[-length:])
        self._shown = decode(self._window)
        self._recent = len(self._window)

    def _show(self, seen: str) -> str | None:
        """Lets out what the decoded window says beyond what it said before."""
        # A context may end inside a character, which reads differently once the rest of it is there.
        before = self._shown if seen.startswith(self._shown) else self._shown.rstrip(_INCOMPLETE)
        fresh, stop = self._stop.push(seen[len(before) :])
        self.text += fresh
        self._window += self._held
        self._held = []
        self._shown = seen
        if len(self._window) - self._recent >= _WINDOW:
            self._narrow()
        return stop

    def _narrow(self) -> None:
        """Forgets the older part of the window, unless nothing of the rest is visible to keep a leading space."""
        assert self._decode is not None
        shown = self._decode(self._window[self._recent :])
        if shown:
            self._window, self._shown = self._window[self._recent :], shown
            self._recent = len(self._window)
