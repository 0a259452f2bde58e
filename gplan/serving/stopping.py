"""Stop strings in a growing text: found across pieces, never given out, and held back no longer than needed."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one answer, character by character, so that how it comes in pieces changes nothing.

    The stop string that is complete first ends the answer; of several complete at once, the longest. The cost of a
    character does not grow with the length of the strings (Knuth, Morris and Pratt).

    Args:
        stops: strings that end the answer and are no part of it; none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple((stop, _borders(stop)) for stop in dict.fromkeys(stops))
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text in.

        Returns:
            What may be given out now, and whether a stop string was met. After that nothing more is to be pushed.
        """
        if not self._stops:
            return text, False
        before, whole = len(self._held), self._held + text
        for index, character in enumerate(text):
            complete = self._advance(character)
            if complete:
                self._held = ""
                return whole[: before + index + 1 - complete], True
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], False

    def finish(self) -> str:
        """What is held: the answer ended and it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that `character` completes, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                complete = max(complete, matched)
                matched = borders[matched]
            self._matched[index] = matched
        return complete


def _borders(text: str) -> list[int]:
    """For each length, how long the longest proper end of `text[:length]` is that `text` also begins with."""
    borders = [0, 0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = borders[matched]
        matched += text[matched] == character
        borders.append(matched)
    return borders
