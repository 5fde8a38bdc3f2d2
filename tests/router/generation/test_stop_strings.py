"""Stop strings against a slow oracle that sees the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.generation.choice_text import StopStrings

LETTERS = st.text(alphabet="ab", min_size=1, max_size=4)


def slow_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read the text character by character; the first moment it ends in a stop string is the end."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
@example(["aab"], ["a", "a", "a", "b"])  # the end of a wrong start begins the right one
@example(["ab", "b"], ["a", "b"])
@example(["abb", "b"], ["ab", "b"])  # the shorter one ends first
@example(["a", "a"], [""])
def test_the_outcome_is_that_of_the_whole_text_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    watcher, shown, is_stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stop_string = watcher.push(piece)
        shown += text
        if stop_string is not None:
            is_stopped = True
            break
    if not is_stopped:
        shown += watcher.flush()
    assert (shown, is_stopped) == slow_cut("".join(pieces), stops)


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
@example(["aab"], ["a", "a", "a", "b"])
@example(["abab", "b"], ["ab", "ab"])
def test_nothing_shown_is_taken_back(stops: list[str], pieces: list[str]) -> None:
    final, _ = slow_cut("".join(pieces), stops)
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stop_string = watcher.push(piece)
        shown += text
        assert final.startswith(shown)
        if stop_string is not None:
            break


def test_only_what_may_still_match_is_held_back() -> None:
    watcher = StopStrings(["stop"])
    assert watcher.push("a st")[0] == "a "
    assert watcher.push("a")[0] == "sta"
    assert watcher.push("sto")[0] == ""
    assert watcher.flush() == "sto"
