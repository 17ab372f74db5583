"""Renders printed text as a terminal shows it, with carriage returns and control sequences applied.

A progress bar that redraws itself four hundred times is one line to a person, and should be one line to a model. The
screen has no right edge, so lines are not wrapped. Rows that scrolled away are kept. Each cell is one character,
regardless of its display width.

The sequences are those of ECMA-48 and the extensions of xterm. The pyte package emulates a whole terminal. It takes a
second where this takes milliseconds, and it wraps lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

ROWS = 100
"""Rows of the screen. The cursor cannot move further up."""

COLUMNS = 1000
"""The column up to which the cursor can move, and text can be shifted, beyond the end of a line."""

MOST_CHARACTERS = 512 * 1024
"""The longest text that is rendered. In a longer one, sequences are dropped and each line keeps its last overwrite."""

MOST_CELLS = 4_000_000
"""The most cells that a text may shift and erase. A text that exceeds this is treated like one that is too long."""

_HAS_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SEQUENCE = (
    r"(?:\x1b\[|\x9b)(?P<parameters>[0-?]*+)[ -/]*+(?P<final>[@-~])"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x9c]*+(?:\x07|\x1b\\|\x9c)"  # titles, links, images
    r"|\x1b(?:[ -/]++[0-~]|(?P<escape>[0-Z\\`-~]))"  # except the starts of the sequences above
    r"|(?:\x1b\[|\x9b)[0-?]*+[ -/]*+"  # cut off
)
_TOKEN = re.compile(
    rf"(?P<text>[^\x00-\x08\x0a-\x1f\x7f-\x9f]++)|(?P<newline>\r*\n)|{_SEQUENCE}|(?P<control>.)", re.DOTALL
)
_LEFT_OUT = re.compile(rf"{_SEQUENCE}|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]".replace("?P<", "?P<_"), re.DOTALL)
_MOST = 10**6  # the largest count in a sequence


def render_terminal_output(text: str) -> str:
    """Return what a terminal shows after a text was printed.

    The work is bounded for every text; see `MOST_CHARACTERS` and `MOST_CELLS`.
    """
    if _HAS_CONTROLS.search(text) is None:
        return text
    if len(text) <= MOST_CHARACTERS:
        screen = _Screen()
        for token in _TOKEN.finditer(text):
            screen.take(token)
            if screen.cells > MOST_CELLS:
                break
        else:
            return screen.text()
    return _last_written(text)


def _last_written(text: str) -> str:
    lines = _LEFT_OUT.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


class _Screen:
    """Rows of characters and a cursor. Only the last `ROWS` rows can be changed.

    Attributes:
        cells: an upper bound of the cells that were shifted and erased.
    """

    def __init__(self) -> None:
        self.cells = 0
        self._rows: list[list[str]] = [[]]
        self._row = self._column = self._top = 0
        self._saved = (0, 0)
        self._main: tuple[list[list[str]], int, int, int] | None = None  # set while the alternate screen is shown

    def text(self) -> str:
        """Return the shown rows, after those that scrolled away."""
        rows = self._rows if self._main is None else [*self._main[0], *self._rows]
        return "\n".join(map("".join, rows))

    def take(self, token: re.Match[str]) -> None:
        """Write the next text, or execute the next control."""
        kind, value = token.lastgroup, token[0]
        if kind == "text":
            self._write(value)
        elif kind == "newline":
            self._feed()
        elif kind == "final":
            if (action := _ACTIONS.get(token["final"])) is not None:
                action(self, token["parameters"])
        elif kind == "escape":
            self._escape(value[1])
        elif value == "\r":
            self._column = 0
        elif value == "\b":
            self._column = max(0, self._column - 1)
        elif value in "\v\f\x84":
            self._feed(self._column)
        elif value == "\x85":
            self._feed()

    # --- what is written ----------------------------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        row, column = self._rows[self._row], self._column
        if column > len(row):
            row += " " * (column - len(row))
        row[column : column + len(text)] = text
        self._column = column + len(text)

    def _feed(self, column: int = 0) -> None:
        """Move the cursor to the next row."""
        self._row += 1
        self._column = column
        if self._row == len(self._rows):
            self._rows.append([])
            self._top = max(self._top, len(self._rows) - ROWS)

    # --- where the cursor goes ----------------------------------------------------------------------------------------

    def _go(self, row: int, column: int) -> None:
        self._row = max(self._top, min(row, self._top + ROWS - 1))
        while len(self._rows) <= self._row:
            self._rows.append([])
        self._column = max(0, min(column, max(COLUMNS, len(self._rows[self._row]))))

    def _escape(self, letter: str) -> None:
        if letter == "7":
            self._saved = (self._row - self._top, self._column)
        elif letter == "8":
            self._go(self._top + self._saved[0], self._saved[1])
        elif letter == "M":
            self._go(self._row - 1, self._column)
        elif letter in "DE":
            self._feed(self._column if letter == "D" else 0)
        elif letter == "c":
            self._erase_screen("2")
            self._go(self._top, 0)

    def _up(self, parameters: str) -> None:
        self._go(self._row - _number(parameters), self._column)

    def _down(self, parameters: str) -> None:
        self._go(self._row + _number(parameters), self._column)

    def _right(self, parameters: str) -> None:
        self._go(self._row, self._column + _number(parameters))

    def _left(self, parameters: str) -> None:
        self._go(self._row, self._column - _number(parameters))

    def _next_line(self, parameters: str) -> None:
        self._go(self._row + _number(parameters), 0)

    def _line_before(self, parameters: str) -> None:
        self._go(self._row - _number(parameters), 0)

    def _to_column(self, parameters: str) -> None:
        self._go(self._row, _number(parameters) - 1)

    def _to_row(self, parameters: str) -> None:
        self._go(self._top + _number(parameters) - 1, self._column)

    def _to_place(self, parameters: str) -> None:
        row, _, column = parameters.partition(";")
        self._go(self._top + _number(row) - 1, _number(column) - 1)

    # --- what is erased and shifted -----------------------------------------------------------------------------------

    def _touched(self) -> list[str]:
        """Return the row of the cursor, and count its cells as changed."""
        row = self._rows[self._row]
        self.cells += len(row)
        return row

    def _erase_line(self, parameters: str) -> None:
        row, column = self._touched(), self._column
        if parameters in ("", "0"):
            del row[column:]
        elif parameters == "1":
            row[: column + 1] = " " * min(column + 1, len(row))
        elif parameters == "2":
            row.clear()

    def _erase_screen(self, parameters: str) -> None:
        if parameters in ("", "0"):
            del self._rows[self._row + 1 :]
            self._erase_line("")
        elif parameters == "1":
            self._clear(self._row)
            self._erase_line("1")
        elif parameters in ("2", "3"):
            del self._rows[self._row + 1 :]
            self._clear(self._row + 1)

    def _clear(self, end: int) -> None:
        self.cells += ROWS
        for row in self._rows[self._top : end]:
            row.clear()

    def _erase_characters(self, parameters: str) -> None:
        row, column = self._touched(), self._column
        count = min(_number(parameters), max(0, len(row) - column))
        row[column : column + count] = " " * count

    def _delete_characters(self, parameters: str) -> None:
        del self._touched()[self._column : self._column + _number(parameters)]

    def _insert_characters(self, parameters: str) -> None:
        row, column = self._touched(), self._column
        if column < len(row):
            length = max(len(row), COLUMNS)
            row[column:column] = " " * min(_number(parameters), length - column)
            del row[length:]

    def _delete_rows(self, parameters: str) -> None:
        del self._rows[self._row : self._row + min(_number(parameters), ROWS)]
        if self._row == len(self._rows):
            self._rows.append([])
        self._column = 0

    def _insert_rows(self, parameters: str) -> None:
        count = min(_number(parameters), ROWS)
        self.cells += ROWS * count
        self._rows[self._row : self._row] = [[] for _ in range(count)]
        del self._rows[self._top + ROWS :]
        self._column = 0

    # --- the other screen, of programs that take all of it ------------------------------------------------------------

    def _set_mode(self, parameters: str) -> None:
        if parameters in _OTHER_SCREEN and self._main is None:
            self._main = (self._rows, self._row, self._column, self._top)
            self._rows, self._row, self._column, self._top = [[]], 0, 0, 0

    def _reset_mode(self, parameters: str) -> None:
        if parameters in _OTHER_SCREEN and self._main is not None:
            self._rows, self._row, self._column, self._top = self._main
            self._main = None

    def _save(self, _: str) -> None:
        self._escape("7")

    def _restore(self, _: str) -> None:
        self._escape("8")


_OTHER_SCREEN = ("?1049", "?1047", "?47")

_ACTIONS: dict[str, Callable[[_Screen, str], None]] = {
    "A": _Screen._up,
    "B": _Screen._down,
    "C": _Screen._right,
    "D": _Screen._left,
    "E": _Screen._next_line,
    "F": _Screen._line_before,
    "G": _Screen._to_column,
    "`": _Screen._to_column,
    "H": _Screen._to_place,
    "f": _Screen._to_place,
    "d": _Screen._to_row,
    "e": _Screen._down,
    "a": _Screen._right,
    "J": _Screen._erase_screen,
    "K": _Screen._erase_line,
    "X": _Screen._erase_characters,
    "P": _Screen._delete_characters,
    "@": _Screen._insert_characters,
    "M": _Screen._delete_rows,
    "L": _Screen._insert_rows,
    "h": _Screen._set_mode,
    "l": _Screen._reset_mode,
    "s": _Screen._save,
    "u": _Screen._restore,
}
"""Actions of control sequences by final character. Other sequences, such as colours, do not change the shown text."""


def _number(parameter: str) -> int:
    """Return the count that a parameter of a sequence gives: at least 1."""
    digits = parameter.partition(";")[0]
    return max(1, min(int(digits[:8]), _MOST)) if digits.isdecimal() else 1
