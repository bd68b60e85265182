"""What commands of the bench print and write when they have measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.measure.report import Page


def tell(
    *, json: Callable[[], Any] | None, text: Callable[[], None], html: Path | None, page: Callable[[], Page]
) -> None:
    """`json` where it is given, else `text`; then the page, which may meet a disk that is full by now: nothing that was
    measured is lost with it."""
    from headrace.cli.output import print_json
    from headrace.errors import UsageError

    if json is not None:
        print_json(json())
    else:
        text()
    if html is None:
        return
    try:
        html.write_text(page().html(), encoding="utf-8")
    except OSError as error:
        sys.stdout.flush()
        raise UsageError("the page was not written", where=str(html), found=error.strerror or str(error)) from None
    print(f"page: {html}", file=sys.stderr)
