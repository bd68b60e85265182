"""The arithmetic of accelerator utilisation (AU): the share of the time in which an accelerator computes.

MLPerf Storage's rules (Submission_guidelines, 2.1): total compute time / total time of the run, the first step's reads
left out. DLIO, which carries it out, leaves out whole steps at the begin (`metric.exclude_start_steps`: 1). So it is
here, but for one thing: DLIO counts the sleep that it measured, which is longer than the computing that it stands for,
and the more so the busier the machine is. Here a step counts as the computing that was asked for, and what a sleep
lasts longer is lost time: never a higher AU than by DLIO.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import UsageError

#: Steps at the begin that do not count, as MLPerf has it.
EXCLUDED_STEPS = 1


def utilisation(ends_s: Sequence[float], compute_s: float, excluded: int = EXCLUDED_STEPS) -> float:
    """AU, 0 to 1, of steps that ended at these times (one clock, ascending), each with `compute_s` of computing.

    The first `excluded` steps do not count: the time begins at the end of the last of them. `UsageError` where none
    remains.
    """
    if excluded < 1 or len(ends_s) <= excluded:
        raise UsageError("AU", expected=f"more than {max(1, excluded)} steps", found=str(len(ends_s)))
    counted = len(ends_s) - excluded
    seconds = ends_s[-1] - ends_s[excluded - 1]
    return 1.0 if seconds <= 0 else min(1.0, counted * compute_s / seconds)
