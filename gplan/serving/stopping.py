"""Stop strings in a growing text: found across pieces, never given out, and held back no longer than needed."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one answer.

    Args:
        stops: strings that end the answer and are no part of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text in.

        Returns:
            What may be given out now, and whether a stop string was met. After that nothing more is to be pushed.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = self._beginning_of_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What is held: the answer ended and it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0
