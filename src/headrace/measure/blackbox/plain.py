"""A pickle of plain containers, read without letting it do anything.

A pickle is a program: it may name functions and have them called, and even where it may not, one of a few bytes may ask
for gigabytes (a length, the number of a memo). So none is unpickled here. `pickletools.genops`, which carries nothing
out, takes the bytes apart, and of its operations those are followed that make dictionaries, lists, tuples, text,
numbers, truth values and None: all that a flight recorder writes. Anything else ends the reading.

One value may stand in many places: whoever walks through what was read has to bound that.
"""

from __future__ import annotations

import math
import pickletools
from typing import Any

#: Operations of one pickle; a recorder's ring of 2000 collectives with their stacks has about a million.
MOST_OPERATIONS = 8_000_000

_VALUES = frozenset(
    ("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
     "SHORT_BINUNICODE", "BINUNICODE8")
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def load_plain(data: bytes, *, most_operations: int = MOST_OPERATIONS) -> Any:
    """What `data` says. `ValueError` for what is not of plain containers, is cut off, or is too large."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count >= most_operations:
                raise ValueError(f"more than {most_operations} operations")
            name = operation.name
            if name == "STOP":
                break
            _carry_out(name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from error
    if len(stack) != 1 or stack[0] is _MARK:
        raise ValueError("damaged (not one value)")
    return stack[0]


def _carry_out(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _VALUES:
        value = _CONSTANTS.get(name, argument)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number that is none")
        stack.append(value)
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _TUPLES:
        made = tuple(_plain(stack.pop()) for _ in range(_TUPLES[name]))
        stack.append(made[::-1])
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = [_plain(stack.pop())] if name == "APPEND" else _since_mark(stack)
        _of(stack[-1], list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [_plain(stack.pop()) for _ in range(2)][::-1] if name == "SETITEM" else _since_mark(stack)
        into = _of(stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A recorder has no others. Numbers can be chosen such that all have one hash.
            if not isinstance(key, str):
                raise ValueError("a key that is no text")
            into[key] = value
    elif name not in ("PROTO", "FRAME"):
        raise ValueError(f"{name} is not of plain data")


def _plain(value: Any) -> Any:
    if value is _MARK:
        raise ValueError("damaged (a mark in a value)")
    return value


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("damaged (no mark)")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError("damaged (not what it is filled as)")
    return value
