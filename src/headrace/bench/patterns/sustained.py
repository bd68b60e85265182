"""Reads that go on for long, over all of the data again and again: does the rate last?

The page cache is passed by (O_DIRECT) where what was read once would come from it the second time.
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.bench.cache import DIRECT, DROPPED
from headrace.bench.figures import BYTES_PER_S, Figure, Outcome, Series
from headrace.bench.patterns.flows import Measured, measure
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, in_order, split
from headrace.bench.places.protocol import Place, Tell
from headrace.bench.sustained import Judgement, judge
from headrace.units import MIB, format_bytes

REQUEST = 1 * MIB
#: A slot holds about so many batches of all flows: fewer would be levels of their own.
_BATCHES = 16


def run(place: Place, options: Options, tell: Tell) -> tuple[Outcome, Judgement]:
    """One run, until the time is up or the budget is read, and its levels. Figures: what lasts, what came first, the
    burst credit; the note is the sentence of `headrace.bench.sustained.judge`."""
    if place.keeps and options.cache == DROPPED:
        options = replace(options, cache=DIRECT)
    request = options.request_bytes or REQUEST
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    found: Measured = measure(
        place, options, lambda flow: in_order(grid, options, flow, again=True), tell, "sustained reads"
    )
    _, batch = split(options.depth)
    # Where the path stands at the end, the time that was given is over long after the last read that came.
    seconds = found.seconds if found.bytes >= options.budget_bytes else max(found.seconds, options.seconds)
    judgement = judged(found.series, seconds, _BATCHES * batch * request, "reading")
    made = outcome(
        "sustained", place, options, found.bytes, seconds, found.series, judgement,
        work=format_bytes(request), cache=cache,
    )  # fmt: skip
    return made, judgement


def judged(series: Series, seconds: float, least_bytes: int, what: str) -> Judgement:
    """Of the whole slots of `seconds`, added up to ones that hold about `least_bytes`. A series that ends before stood
    from there on."""
    slots = int(seconds / series.every_s)
    whole = list(series.bytes[:slots])
    whole += [0] * (slots - len(whole))
    mean = sum(whole) / len(whole) if whole else 0.0
    if not whole:
        return judge([series.total_bytes], max(seconds, 1e-9), what)
    # Of a run that is shorter than such a slot its rate remains.
    fold = min(max(1, math.ceil(least_bytes / mean)), len(whole)) if mean else 1
    folded = [sum(whole[at : at + fold]) for at in range(0, len(whole) - fold + 1, fold)]
    return judge(folded, fold * series.every_s, what)


def outcome(
    pattern: str, place: Place, options: Options, moved: int, seconds: float, series: Series, judgement: Judgement, *,
    work: str, cache: str = "", durable: str = "",
) -> Outcome:  # fmt: skip
    levels = judgement.segments
    figures = [Figure(name="lasts", value=judgement.sustained_rate, unit=BYTES_PER_S, note=judgement.kind)]
    if len(levels) > 1:
        figures.append(
            Figure(name="first", value=levels[0].rate, unit=BYTES_PER_S, note=f"for {levels[0].seconds:.1f} s")
        )
    if judgement.credit_bytes is not None:
        figures.append(Figure(name="credit", value=judgement.credit_bytes, unit="B", note="above what lasts"))
    return Outcome(
        pattern=pattern, path=place.name, work=work, flows=options.flows, bytes=moved, seconds=seconds, series=series,
        figures=figures, cache=cache, durable=durable, notes=(judgement.sentence,),
    )  # fmt: skip
