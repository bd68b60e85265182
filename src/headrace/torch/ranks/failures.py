"""DCP's failures as ours: its `CheckpointException` is a BaseException, which `except Exception` does not catch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

from torch.distributed.checkpoint.api import CheckpointException

from headrace.errors import CheckpointFailed, HeadraceError

_UNTOUCHED = "the committed checkpoints are untouched"


@contextlib.contextmanager
def translated(
    doing: str,
    known: Callable[[], HeadraceError | None] = lambda: None,
    which: Callable[[], str | None] = lambda: None,
) -> Iterator[None]:
    """Raise what DCP raises inside as HeadraceError: the failure of the lowest rank, in its own kind if it is ours.

    Args:
        doing: `"save"` or `"load"`.
        known: what this rank knows better than the collective that broke after it, if anything.
        which: the checkpoint, for the text.
    """
    try:
        yield
    except HeadraceError:
        raise
    except CheckpointException as error:
        raise known() or _first(error, _named(doing, which())) from error
    except Exception as error:
        raise known() or _broken(error, _named(doing, which())) from error


def _named(doing: str, checkpoint: str | None) -> str:
    return f"{doing} of {checkpoint}" if checkpoint else doing


def _first(error: CheckpointException, doing: str) -> HeadraceError:
    if not error.failures:
        return _broken(error, doing)
    rank, (cause, _) = min(error.failures.items(), key=lambda pair: pair[0])
    if isinstance(cause, HeadraceError):
        # A copy: the same object may be raised on several threads, each with a traceback of its own.
        return copy.copy(cause)
    return CheckpointFailed(
        f"the {doing} was given up: rank {rank} failed",
        found=f"{type(cause).__name__}: {cause}",
        next_step=_UNTOUCHED,
    )


def _broken(error: BaseException, doing: str) -> HeadraceError:
    text = str(error)
    return CheckpointFailed(
        f"the {doing} was given up",
        found=f"{type(error).__name__}: {text.splitlines()[0] if text else ''}",
        next_step=_UNTOUCHED,
    )
