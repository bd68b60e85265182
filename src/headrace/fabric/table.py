"""One table of a configuration file or request, read key by key. Whatever is wrong is one `UsageError` that names the
key by its path, and a key that nobody knows is refused: a spelling error never means a default."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.settings import check_nqn
from headrace.units import parse_bytes


def _kind(value: object) -> str:
    """A value as its writer would call it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    try:
        text = repr(value)
    except ValueError:
        # Python prints no number of more than 4300 digits; 0xffff... may be one.
        return "a number that is too long"
    return text if len(text) <= 60 else text[:57] + "..."


class Table:
    """`file`: where it stands, for errors; `path`: of the table in it."""

    def __init__(self, tree: Mapping[str, Any], *, file: str, path: str = "") -> None:
        self.file = file
        self.path = path
        self._tree = tree
        self.keys = list(tree)

    def error(
        self, key: str, *, expected: str | None = None, found: str | None = None, next_step: str | None = None
    ) -> UsageError:
        return UsageError(self.place(key), where=self.file, expected=expected, found=found, next_step=next_step)

    def place(self, key: str) -> str:
        """Its path; of what nobody knows, and may have written into a key, no more than is of use."""
        key = key if len(key) <= 60 else f"{key[:57]}..."
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        """As it stands there; whoever asks for it checks it."""
        return self._tree.get(key)

    def shown(self, key: str) -> str:
        """The value as its writer would call it, for an error's `found`."""
        return _kind(self._tree.get(key))

    def only(self, *known: str) -> None:
        """Refuse every other key; first of all, so that a missing key is not blamed for a misspelt one."""
        for key in self._tree:
            if key in known:
                continue
            near = difflib.get_close_matches(key, known, n=1)
            raise self.error(
                key,
                expected=f"one of {', '.join(known)}",
                found="a key that nobody knows",
                next_step=f"did you mean {near[0]}?" if near else None,
            )

    def text(self, key: str, longest: int) -> str | None:
        """At most `longest` bytes, printable."""
        value = self._tree.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, str)
            or not 0 < len(value.encode(errors="replace")) <= longest
            or not _printable(value)
        ):
            raise self.error(key, expected=f"printable text of 1 to {longest} bytes", found=_kind(value))
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key, 4096)
        if value is None:
            raise self.error(key, expected="a text", found="nothing")
        return value

    def nqn(self, key: str) -> str:
        value = self.required_text(key)
        try:
            check_nqn(key, value)
            if not value.startswith("nqn.") or not value.isascii():
                raise UsageError(key)
        except UsageError:
            expected = "an NVMe name, nqn.YYYY-MM.DOMAIN:NAME, at most 223 printable ASCII characters without spaces"
            raise self.error(key, expected=expected, found=_kind(value)) from None
        return value

    def digits(self, key: str) -> str | None:
        """32 hexadecimal digits, hyphens anywhere."""
        value = self._tree.get(key)
        if value is not None and (
            not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f]{32}", value.replace("-", ""))
        ):
            raise self.error(key, expected="32 hexadecimal digits", found=_kind(value))
        return None if value is None else str(value)

    def flag(self, key: str) -> bool:
        value = self._tree.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, expected="true or false", found=_kind(value))
        return bool(value)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self._tree.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise self.error(key, expected=f"a whole number from {low} to {high}", found=_kind(value))
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self._tree.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(key, expected=f"a number from {low:g} to {high:g}", found=_kind(value))
        return float(value)

    def size(self, key: str, low: int, high: int, *, multiple: int = 1) -> int | None:
        """Bytes: a whole number, or a text such as "64GiB"."""
        value = self._tree.get(key)
        if value is None:
            return None
        count = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str):
            try:
                count = parse_bytes(value)
            except ValueError:
                count = None
        if count is None:
            raise self.error(key, expected='a size such as "64GiB"', found=_kind(value))
        if not low <= count <= high or count % multiple:
            multiples = f", a multiple of {multiple}" if multiple > 1 else ""
            raise self.error(key, expected=f"{low} to {high} bytes{multiples}", found=_kind(value))
        return count

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        value = self._tree.get(key)
        if value is not None and value not in choices:
            raise self.error(key, expected=" or ".join(choices), found=_kind(value))
        return None if value is None else str(value)

    def table(self, key: str) -> Table | None:
        value = self._tree.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, expected="a table", found=_kind(value))
        return Table(value, file=self.file, path=self.place(key))

    def tables(self, key: str) -> list[Table]:
        value = self._tree.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.error(key, expected=f"[[{self.place(key)}]], a list of tables", found=_kind(value))
        return [Table(item, file=self.file, path=f"{self.place(key)}[{i}]") for i, item in enumerate(value)]

    def tables_or_texts(self, key: str, *, text_key: str) -> list[Table]:
        """A list of tables; a text in their place stands for a table with this one key."""
        value = self._tree.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, Mapping | str) for item in value):
            raise self.error(key, expected="a list of texts or tables", found=_kind(value))
        return [
            Table({text_key: item} if isinstance(item, str) else item, file=self.file, path=f"{self.place(key)}[{i}]")
            for i, item in enumerate(value)
        ]


def _printable(text: str) -> bool:
    return text.isprintable()
