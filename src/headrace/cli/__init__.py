"""`headrace` on the command line. One file per command; nothing heavy is imported before a command runs.

__init__.py   main(): runs a command, and turns every error into one line and an exit status
commands.py   which commands there are
app.py        all of them
output.py     tables for people, JSON for machines
serve.py target.py discover.py volume/ ingest.py dataset/ checkpoint/ demo.py doctor.py bench/
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, cast

from headrace.errors import HeadraceError

#: What a shell shows for a program that SIGINT ended.
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `headrace ARGUMENTS` (default: those of this process) and return its exit status.

    0 success; 1 it did not work; 2 it was asked for something that cannot be meant; 130, 143 and 129 ended by Ctrl-C,
    SIGTERM and SIGHUP, in order. An error is one line on standard error: `headrace: error: ...`, or an object of JSON
    where the command was given `--json`; tracebacks are for defects.
    """
    _hold_standard_descriptors()
    if sys.stdout is None:
        # Closed by the shell (`>&-`): what would be printed goes nowhere.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    given = list(sys.argv[1:] if arguments is None else arguments)
    fail = _Failure("--json" in given[: given.index("--")] if "--" in given else "--json" in given)
    with _ended_in_order() as ended:
        return _run(given, fail, ended)


def _run(given: list[str], fail: _Failure, ended: list[int]) -> int:
    try:
        import typer

        command = _commands(given[0] if given else "")
    except KeyboardInterrupt:
        return fail.interrupted(ended)

    # Every usage error of typer's parser is one of these, wherever this version of typer keeps them.
    parser_error = cast("type[Exception]", typer.BadParameter.__mro__[2])
    try:
        status = command.main(args=given, prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
        # Newer versions of typer turn KeyboardInterrupt into this status by themselves, and say nothing.
        return fail.interrupted(ended) if status == INTERRUPTED else int(status or 0)
    except HeadraceError as error:
        return fail.error(error)
    except parser_error as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "headrace"
        text = _message(error) or "a command is missing"
        arguments = [given.metavar for given in context.command.params] if context is not None else []
        if getattr(error, "option_name", "") == "--volume" and "URI..." in arguments:
            # Other commands take it so, and who comes from them tries it here.
            text += " (the addresses of the volume are arguments here, without an option)"
        return fail.usage(f"{text}; see `{path} --help`")
    except (KeyboardInterrupt, typer.Abort):
        return fail.interrupted(ended)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does. Point it elsewhere, so that the flush at exit is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        return fail.say(text, 1, kind=type(error).__name__, fault="host")
    except MemoryError:
        return fail.say("out of memory", 1, kind="MemoryError", fault="host")


@cache
def _commands(first: str) -> Any:
    """The parser, with one command where that is the first word."""
    import typer

    from headrace.cli.commands import COMMANDS, make

    return typer.main.get_command(make((first,) if first in COMMANDS else COMMANDS))


class _Ended(KeyboardInterrupt):
    """By another signal than SIGINT. Not a KeyboardInterrupt itself: where one goes through an `exec` of text (a
    dataclass is made), Python ends the process by SIGINT at last, whatever its exit status was to be.
    """


@contextmanager
def _ended_in_order() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: nothing half-made stays. Gives the signals that came."""
    came: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise _Ended

    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    # What somebody chose to ignore (`nohup`), or to handle, stays so.
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, handler)


def _hold_standard_descriptors() -> None:
    """Where the shell closed one of them, the next file to be opened would get its number: a member of a volume, into
    which the last words of a library that dies would then be written."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.


def _message(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(str(text).split()).rstrip(".")


class _Failure:
    """Says what went wrong, as the caller reads it, and which exit status that is."""

    def __init__(self, json: bool) -> None:
        self._json = json

    def say(self, message: str, status: int, **facts: str | None) -> int:
        if self._json:
            import json

            found = {"message": message, **facts, "exit_status": status}
            print(json.dumps({"error": found}), file=sys.stderr)
        else:
            # Names of files and keys are whatever their owner made them: nothing in one steers a terminal.
            line = "".join(one if one.isprintable() else " " if one.isspace() else "\ufffd" for one in message)
            print(f"headrace: error: {line}", file=sys.stderr)
        return status

    def error(self, error: HeadraceError) -> int:
        return self.say(
            str(error), error.exit_status, kind=type(error).__name__, fault=error.fault, what=error.what,
            where=error.where, expected=error.expected, found=error.found, next_step=error.next_step,
        )  # fmt: skip

    def usage(self, message: str) -> int:
        return self.say(message, 2, kind="UsageError", fault="caller")

    def interrupted(self, ended: list[int]) -> int:
        return self.say("interrupted", 128 + ended[0] if ended else INTERRUPTED, kind="Interrupted", fault="caller")
