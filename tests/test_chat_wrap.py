"""Chat lines break between words, whatever pieces the text arrives in."""

from __future__ import annotations

import pyte
from hypothesis import given
from hypothesis import strategies as st

from edge.apps.chat.wrap import Wrap, wrapped

PROSE = "The quick brown fox jumps over the lazy dog, and (nobody) minds. " * 4
WORDS = st.text(st.sampled_from("ab é日ñ\n`~\u0301👍"), max_size=120)


def shown(text: str, columns: int, size: int = 3) -> list[str]:
    """Return the lines on a terminal of a given width, for text in pieces of a given size."""
    wrap = Wrap(lambda: columns)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    written = "".join([wrap.feed(piece) for piece in pieces] + [wrap.rest()])
    screen = pyte.Screen(columns, 400)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display]


def test_no_word_is_cut() -> None:
    for columns in (20, 31, 40, 60, 64, 65, 80):
        for size in (1, 3, 1000):
            lines = [line for line in shown(PROSE, columns, size) if line]
            assert " ".join(lines).split() == PROSE.split()
            # and each line is as full as possible
            words = [line.split()[0] for line in lines[1:]]
            for line, word in zip(lines, words, strict=False):
                assert len(line) <= columns < len(line) + 1 + len(word)


def test_a_word_is_written_as_it_comes_where_it_has_room() -> None:
    wrap = Wrap(lambda: 40)
    assert [wrap.feed(piece) for piece in ("He", "llo", " the", "re")] == [
        "He",
        "llo",
        " the",
        "re",
    ]
    assert wrap.feed(", how are you?") == ", how are " and wrap.rest() == "you?"


def test_what_fits_nowhere_is_cut_by_the_terminal() -> None:
    address = "https://example.com/" + "x" * 50
    lines = shown(f"See the following page: {address} or not", 40)
    assert lines[:4] == ["See the following page:", address[:40], address[40:] + " or", "not"] or (
        lines[:3] == ["See the following page:", address[:40], address[40:] + " or not"]
    )


def test_code_stays_as_it_is() -> None:
    code = "value = " + "some_function(an_argument, another_one) + " * 3 + "1"
    text = f"So:\n```python\n{code}\n```\n{PROSE}"
    wrap = Wrap(lambda: 40)
    written = "".join(wrap.feed(letter) for letter in text) + wrap.rest()
    assert f"```python\n{code}\n```\n" in written
    assert written != text and written.split() == text.split()


def test_a_full_line_adds_no_empty_one() -> None:
    full = "a" * 10 + " " + "b" * 29
    assert shown(f"{full} \n{full} {full}\n\nend", 40)[:6] == [full, full, full, "", "end", ""]


def test_wide_letters_end_lines_anywhere() -> None:
    text = "日本語の文章は空白なしで書かれる。" * 3
    lines = [line.replace(" ", "") for line in shown(text, 20)]
    assert "".join(lines) == text and max(map(len, lines)) == 10


def test_a_window_that_is_resized_and_a_line_that_tells_no_size() -> None:
    columns = 80
    wrap = Wrap(lambda: columns)
    written = wrap.feed(PROSE)
    columns = 30
    written += wrap.feed(PROSE)
    columns = 0
    written += wrap.feed(PROSE)
    assert written.endswith(PROSE) and written.split() == (PROSE * 3).split()


@given(WORDS, st.integers(1, 40), st.integers(1, 5))
def test_no_letter_is_lost_or_made_up(text: str, columns: int, size: int) -> None:
    wrap = Wrap(lambda: columns)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    written = "".join([wrap.feed(piece) for piece in pieces] + [wrap.rest()])
    assert "".join(written.split()) == "".join(text.split())
    assert written.count("\n") >= text.count("\n")


def test_notes_are_wrapped_and_keep_their_columns() -> None:
    note = "/fork [NAME]      keep what was said up to here, to return to\nshort"
    assert wrapped(note, 80) == note
    assert wrapped(note, 40).split("\n") == [
        "/fork [NAME]      keep what was said up",
        "  to here, to return to",
        "short",
    ]
    assert wrapped("saved to /a/long/path/that-is/one-word.edge", 20).split("\n")[1].strip() == (
        "/a/long/path/that-is/one-word.edge"
    )
