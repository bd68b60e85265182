"""`headrace` on the command line. One file per command; nothing heavy is imported before a command runs.

__init__.py   main(): runs a command, and turns every error into one line and an exit status
app.py        which commands there are
output.py     tables for people, JSON for machines
serve.py target.py discover.py volume.py ingest.py demo.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from headrace.errors import HeadraceError

#: What a shell shows for a program that SIGINT ended.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `headrace ARGUMENTS` (default: those of this process) and return its exit status.

    0 success; 1 it did not work; 2 it was asked for something that cannot be meant; 130 interrupted. An error is one
    line on standard error, `headrace: error: ...`; tracebacks are for defects.
    """
    if sys.stdout is None:
        # Closed by the shell (`>&-`): what would be printed goes nowhere.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        import typer

        from headrace.cli.app import app
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)

    # Every usage error of typer's parser is one of these, wherever this version of typer keeps them.
    parser_error = cast("type[Exception]", typer.BadParameter.__mro__[2])
    command = typer.main.get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = command.main(args=given, prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
        # Newer versions of typer turn KeyboardInterrupt into this status by themselves, and say nothing.
        return _fail("interrupted", INTERRUPTED) if status == INTERRUPTED else int(status or 0)
    except HeadraceError as error:
        return _fail(str(error), error.exit_status)
    except parser_error as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "headrace"
        return _fail(f"{_message(error) or 'a command is missing'}; see `{path} --help`", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does. Point it elsewhere, so that the flush at exit is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)
    except MemoryError:
        return _fail("out of memory", 1)


def _message(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(str(text).split()).rstrip(".")


def _fail(message: str, status: int) -> int:
    print(f"headrace: error: {message}", file=sys.stderr)
    return status
