"""The `.metadata` of a DCP folder, without pickle: its opcodes, carried out by an interpreter that can make nothing.

DCP keeps its metadata as a pickle, and loading a pickle of somebody else's runs whatever that says. Here globals are
names and nothing more: those of DCP's classes become `Record`, a torch dtype its name, `torch.Size` a tuple of
integers; any other name is refused. No class is looked up, nothing is called, no attribute is set, torch is not needed.

Bounded: bytes before they are read; what is made by the bytes that say so (one opcode makes one thing, and copies
nothing); who walks through the result does so with a bound (`plain`), since a pickle of a page can say that a tuple
holds another one twice, sixty times over.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.checkpoint.manifest import DIMENSION_LIMIT, DTYPE_BYTES
from headrace.errors import CheckpointFailed
from headrace.units import MIB

#: Bytes of a `.metadata`. That of a model of a trillion parameters on thousands of ranks stays below.
METADATA_LIMIT = 1024 * MIB
#: Things in the planner's data, bytes of text in it, and how deep one may lie in others.
PLAIN_LIMIT = 10_000_000
PLAIN_BYTES = 256 * MIB
DEPTH_LIMIT = 16


def _refuse(what: str, *, expected: str | None = None, found: str | None = None) -> NoReturn:
    raise CheckpointFailed(f"this metadata cannot be used: {what}", expected=expected, found=found)


class Record:
    """An object of one of DCP's classes: what it is called, and the state that it was given."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def get(self, name: str) -> Any:
        """A field of its state; None where it has none."""
        return self.state.get(name) if type(self.state) is dict else None


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that may stand in such a pickle. `make`: what calling it gives, from its arguments; None: it is no class
    or function. `record`: it may be made by NEWOBJ, and given a state."""

    kind: str
    make: Callable[[tuple[Any, ...]], Any] | None = None
    record: bool = False


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    values = arguments[0] if len(arguments) == 1 else ()
    if type(values) not in (tuple, list) or len(values) > DIMENSION_LIMIT:
        _refuse("a size", expected="a tuple of whole numbers")
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        _refuse("a size", expected="whole numbers from 0 on")
    return tuple(values)


def _ignored(arguments: tuple[Any, ...]) -> None:
    return None


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    _METADATA: (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
#: Layouts, memory formats and paths: nothing that a manifest keeps, but for what else they could be.
_IGNORED = {
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("builtins", "getattr"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_DICTS = {("builtins", "dict"), ("collections", "OrderedDict")}


def _named(module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        _refuse("a global that has no name")
    if name in _RECORDS.get(module, ()):
        return _Global(name, record=True)
    if module == "torch" and name in DTYPE_BYTES:
        return Dtype(name)
    if (module, name) == ("torch", "Size"):
        return _Global("Size", make=_size)
    if (module, name) in _IGNORED:
        return _Global(name, make=_ignored)
    if (module, name) in _DICTS:
        return _Global("dict", make=lambda arguments: {} if not arguments else _refuse("a dict with arguments"))
    if module == "torch" and name in ("strided", "contiguous_format", "preserve_format", "channels_last"):
        return None
    return _refuse(
        "it names something that is not part of DCP's metadata", expected="classes of DCP", found=f"{module}.{name}"
    )


_MARK = object()


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            _refuse("its stack is empty")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            _refuse("an opcode that does not fit what it is for", expected=kind.__name__)
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                found = self.stack[at + 1 :]
                del self.stack[at:]
                return found
        return _refuse("a mark is missing")

    def put_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            _refuse("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a tuple is that of all it holds, however often it holds that.
            if type(key) not in (str, int, bool, Record):
                _refuse("a key", expected="text, a whole number or an index", found=type(key).__name__)
            target[key] = value

    def call(self, arguments: Any, function: Any) -> None:
        if type(function) is not _Global or function.make is None or type(arguments) is not tuple:
            _refuse("a call of what is no function")
        self.stack.append(function.make(arguments))

    def new(self, arguments: Any, cls: Any) -> None:
        if type(cls) is not _Global or arguments != ():
            _refuse("an object of what is no class of DCP")
        if cls.kind == "dict":
            self.stack.append({})
            return
        if not cls.record:
            _refuse("an object of what is no class of DCP", found=cls.kind)
        self.stack.append(Record(cls.kind))

    def build(self, state: Any) -> None:
        target = self.top(Record)
        # With slots there are two; DCP's classes have none.
        if type(state) not in (dict, tuple):
            _refuse("the state of an object", expected="a dict", found=type(state).__name__)
        target.state = state


def load(data: bytes) -> Any:
    """What the pickle says, of dict, list, tuple, str, bytes, int, float, bool, None, `Record` and `Dtype`.

    CheckpointFailed for anything that DCP's metadata does not need, or that is no pickle.
    """
    machine = _Machine()
    stopped = False
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            stopped = opcode.name == "STOP"
            if not stopped:
                _carry_out(machine, opcode.name, argument)
    except (ValueError, EOFError, OverflowError, UnicodeError, IndexError, KeyError) as error:
        raise CheckpointFailed("this metadata cannot be used: it is no pickle, or cut off", found=str(error)) from error
    if not stopped or len(machine.stack) != 1 or machine.stack[0] is _MARK:
        _refuse("it does not end as a pickle does")
    return machine.stack[0]


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _carry_out(m: _Machine, name: str, argument: Any) -> None:
    stack = m.stack
    if name in _VALUES:
        stack.append(argument)
    elif name == "MEMOIZE":
        m.memo[len(m.memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(m.memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT"):
        m.memo[argument] = stack[-1]
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _TUPLES:
        items = [m.pop() for _ in range(_TUPLES[name])]
        stack.append(tuple(reversed(items)))
    elif name == "TUPLE":
        stack.append(tuple(m.since_mark()))
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "SETITEMS":
        m.put_items(m.since_mark())
    elif name == "SETITEM":
        value, key = m.pop(), m.pop()
        m.put_items([key, value])
    elif name == "APPENDS":
        items = m.since_mark()
        m.top(list).extend(items)
    elif name == "APPEND":
        value = m.pop()
        m.top(list).append(value)
    elif name == "STACK_GLOBAL":
        last, module = m.pop(), m.pop()
        stack.append(_named(module, last))
    elif name == "GLOBAL":
        stack.append(_named(*argument.split(" ", 1)))
    elif name == "REDUCE":
        m.call(m.pop(), m.pop())
    elif name == "NEWOBJ":
        m.new(m.pop(), m.pop())
    elif name == "BUILD":
        m.build(m.pop())
    elif name == "POP":
        m.pop()
    elif name not in ("PROTO", "FRAME"):
        _refuse("it has an opcode that DCP's metadata never needs", found=name)


def plain(value: Any) -> Any:
    """`value` itself, where it is made of None, bool, int, float, str, bytes, list, tuple and dict alone, all numbers
    are such as JSON has, and to walk through it takes PLAIN_LIMIT steps and PLAIN_BYTES at most; CheckpointFailed else.
    """
    left, left_bytes = PLAIN_LIMIT, PLAIN_BYTES
    waiting = [(value, 0)]
    while waiting:
        now, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > DEPTH_LIMIT:
            _refuse("the planner's data are too large, or too deep")
        kind = type(now)
        if kind is dict:
            waiting.extend((each, depth + 1) for pair in now.items() for each in pair)
        elif kind in (list, tuple):
            waiting.extend((each, depth + 1) for each in now)
        elif kind in (str, bytes):
            # One text may be said to stand in ten million places, and would be written out in each.
            left_bytes -= len(now)
            if left_bytes < 0:
                _refuse("the planner's data are too large", expected=f"at most {PLAIN_BYTES} bytes")
        elif (kind is int and now.bit_length() > 64) or (kind is float and not math.isfinite(now)):
            _refuse("the planner's data", expected="numbers of 64 bits", found=kind.__name__)
        elif kind not in (type(None), bool, int, float):
            _refuse("the planner's data", expected="plain values", found=kind.__name__)
    return value
