"""The HTML report of the demo, put together from `headrace.measure`'s charts."""

from __future__ import annotations

from pathlib import Path

from headrace.demo.proof import claims
from headrace.demo.story import Phase, Story, ranks
from headrace.demo.summary import checkpoint_rows, outage_sentence
from headrace.measure.charts import Bar, Lane, Marker, Series, Span, legend, line_chart, stacked_bars, timeline
from headrace.measure.report import Page, badge, table
from headrace.units import format_bytes, format_seconds

_CATEGORY_NAMES = [
    ("compute", "compute"),
    ("data_wait", "data wait"),
    ("checkpoint", "checkpoint stall"),
    ("restart", "restore"),
]


#: Shorter ones would be drawn wider than they are.
SHORTEST_WAIT_S = 0.02


def write_page(story: Story, path: Path) -> None:
    path.write_text(build(story).html(), encoding="utf-8")


def build(story: Story) -> Page:
    options = story.options
    page = Page(
        "headrace demo",
        verdict=story.verdict().sentence,
        subtitle=f"A GPT of {story.parameters:,} parameters, {options.step_count} steps, fed and checkpointed over "
        "NVMe/TCP; target and rank killed on the way.",
    )
    _cards(page, story)
    page.table(
        "What was shown",
        ["", "claim", "finding"],
        [[badge(c.holds, "holds" if c.holds else "fails"), c.text, c.finding] for c in claims(story)],
    )
    page.section("What happened", _timeline(story), note=outage_sentence(story))
    page.section("Loss", *_loss(story), note=_loss_note(story))
    page.section("Time per step", *_steps(story), note="Of the slowest rank in each category; every rank pays for it.")
    _accelerator_time(page, story)
    _storage(page, story)
    page.facts("Where", {**story.environment, **_dataset(story)})
    return page


def _cards(page: Page, story: Story) -> None:
    calm = story.undisturbed()
    commits = [save for save in story.saves() if save["committed"]]
    stall = max((save["staged_s"] for save in commits), default=0.0)
    restore = story.restore()
    cards = [
        (f"{calm.storage_share * 100:.1f} %", "of time lost to storage", "without the outage made on purpose"),
        (
            f"{calm.tokens_per_s:,.0f}",
            "tokens a second",
            f"on {story.options.ranks}, then {ranks(story.options.resume_ranks)}",
        ),
        (str(len(commits)), "checkpoints committed", f"longest stall {format_seconds(stall)}"),
    ]
    if story.outages:
        again = format_bytes(sum(outage.rewritten_bytes for outage in story.outages))
        dead = sum(outage.seconds for outage in story.outages)
        cards.append((f"{dead:.1f} s", "without a target", f"{again} written again"))
    if restore is not None:
        cards.append((format_seconds(restore["seconds"]), "to restore", f"step {restore['step']}, other rank count"))
    page.cards(cards)


# ---- time line ----------------------------------------------------------------------------------------------------


def _timeline(story: Story) -> str:
    phases = [phase for phase in (story.first, story.resumed) if phase is not None]
    if not phases:
        return timeline([])
    zero = phases[0].began
    end = max(phase.ended for phase in phases)
    # Every step a box would be a picket fence: compute is one box, what storage took lies on it.
    training = []
    for phase in phases:
        steps = phase.steps()
        if not steps:
            continue
        training.append(
            Span(
                start=steps[0].started_s - zero,
                end=steps[-1].started_s + steps[-1].total_s - zero,
                style="compute",
                title=f"{phase.name}: steps {steps[0].step} to {steps[-1].step} on {ranks(phase.ranks)}",
                label=ranks(phase.ranks),
            )
        )
        training += _waits(phase, zero)
    saves = []
    for save in story.saves():
        over = save["ended"] or min(end, save["begun"] + 0.5)
        saves.append(
            Span(
                start=save["begun"] - zero,
                end=over - zero,
                style="checkpoint" if save["committed"] else "bad",
                title=f"checkpoint {save['step']}: {'committed' if save['committed'] else 'not committed'}",
                label=str(save["step"]),
            )
        )
    lives = [
        Span(
            start=max(0.0, life.began - zero), end=min(end, life.ended or end) - zero, style="good", title="target runs"
        )
        for life in story.lives
        if life.began < end and (life.ended or end) > zero
    ]
    marks = []
    for outage in story.outages:
        marks.append(Marker(x=outage.killed - zero, text="target killed"))
        marks.append(Marker(x=outage.back - zero, text="back", style="good"))
    if story.rank_kill is not None:
        marks.append(Marker(x=story.rank_kill.killed - zero, text=f"rank {story.rank_kill.rank} killed"))
    if story.resumed is not None and story.resumed.records:
        first = min(record.started_s for record in story.resumed.records)
        marks.append(Marker(x=first - zero, text=f"resumed on {story.resumed.ranks}", style="good"))
    lanes = [
        Lane(name="training", spans=training),
        Lane(name="checkpoints", spans=saves),
        Lane(name="target", spans=lives),
    ]
    keys = [
        ("compute", "compute"),
        ("data_wait", "data wait"),
        ("checkpoint", "checkpoint under way, or stall"),
        ("bad", "lost"),
    ]
    return legend([*keys, ("good", "target runs")]) + timeline(lanes, markers=marks)


def _waits(phase: Phase, zero: float) -> list[Span]:
    """What storage took of each step. Data wait comes first in a step, checkpoint stall last."""
    spans = []
    for step in phase.steps():
        start = step.started_s - zero
        if step.data_wait_s > SHORTEST_WAIT_S:
            title = f"step {step.step}: data wait {format_seconds(step.data_wait_s)}"
            spans.append(Span(start=start, end=start + step.data_wait_s, style="data_wait", title=title))
        if step.checkpoint_s > SHORTEST_WAIT_S:
            over = start + step.total_s - step.restart_s
            title = f"step {step.step}: checkpoint stall {format_seconds(step.checkpoint_s)}"
            spans.append(Span(start=over - step.checkpoint_s, end=over, style="checkpoint", title=title))
    return spans


# ---- loss and steps -----------------------------------------------------------------------------------------------


def _curve(phase: Phase | None) -> list[tuple[float, float]]:
    if phase is None:
        return []
    return sorted({r.step: float(r.notes["loss"]) for r in phase.records if "loss" in r.notes}.items())


def _loss(story: Story) -> list[str]:
    options = story.options
    curves = [
        Series(name="undisturbed run", points=_curve(story.reference), style="s3"),
        Series(name=f"first run, {ranks(options.ranks)}", points=_curve(story.first), style="s0", dots=True),
        Series(name=f"resumed, {ranks(options.resume_ranks)}", points=_curve(story.resumed), style="s1", dots=True),
    ]
    marks = []
    marks += [Marker(x=outage.step, text="target killed") for outage in story.outages]
    if story.rank_kill is not None:
        marks.append(Marker(x=story.rank_kill.resume_step, text="resumed from here", style="good"))
        marks.append(Marker(x=story.rank_kill.step, text="rank killed"))
    marks.sort(key=lambda mark: mark.x)
    present = [curve for curve in curves if curve.points]
    key = legend([(curve.style, curve.name) for curve in present], lines=True)
    return [key, line_chart(present, x_label="step", y_label="loss, nats a token", markers=marks)]


def _loss_note(story: Story) -> str:
    result = story.comparison
    if result is None:
        return ""
    note = (
        f"Bitwise equal to the undisturbed run in {result.same_ranks - len(result.same_ranks_differ)} of "
        f"{result.same_ranks} steps with as many ranks"
    )
    if result.other_ranks:
        note += (
            f"; within {result.other_ranks_difference:.1e} in the {result.other_ranks} steps with another number "
            f"(allowed {result.tolerance:g}), because the same terms are added in another order"
        )
    return note + "."


def _steps(story: Story) -> list[str]:
    bars: list[Bar] = []
    marks = []
    for phase in (story.first, story.resumed):
        if phase is None:
            continue
        if bars:
            marks.append(Marker(x=len(bars) - 0.5, text=f"resumed on {phase.ranks}", style="good"))
        for step in phase.steps():
            parts = [(style, getattr(step, f"{style}_s")) for style, _ in _CATEGORY_NAMES]
            detail = ", ".join(
                f"{name} {format_seconds(getattr(step, f'{style}_s'))}" for style, name in _CATEGORY_NAMES
            )
            end = step.started_s + step.total_s - step.restart_s
            if any(step.started_s <= outage.killed < end for outage in story.outages):
                marks.append(Marker(x=len(bars), text="target killed"))
            bars.append(Bar(label=str(step.step), parts=parts, title=f"step {step.step} ({phase.name}): {detail}"))
    marks.sort(key=lambda mark: mark.x)
    return [legend(_CATEGORY_NAMES), stacked_bars(bars, x_label="step", y_label="seconds", markers=marks)]


# ---- tables -------------------------------------------------------------------------------------------------------


def _accelerator_time(page: Page, story: Story) -> None:
    whole, calm = story.summary(), story.undisturbed()

    def row(name: str, key: str) -> list[str]:
        cells = [name]
        for summary in (whole, calm):
            seconds = getattr(summary, f"{key}_gpu_s")
            cells.append(f"{format_seconds(seconds)}, {seconds / max(summary.total_gpu_s, 1e-9) * 100:.2f} %")
        return cells

    rows = [
        row("compute", "compute"),
        row("data wait", "data_wait"),
        row("checkpoint stall", "checkpoint"),
        row("restore", "restart"),
        row("storage, together", "storage"),
        [
            "step, median and p99",
            *(f"{format_seconds(s.step_p50_s)}, {format_seconds(s.step_p99_s)}" for s in (whole, calm)),
        ],
        [
            "data wait a step, median and p99",
            *(f"{format_seconds(s.data_wait_p50_s)}, {format_seconds(s.data_wait_p99_s)}" for s in (whole, calm)),
        ],
        ["throughput", *(f"{s.tokens_per_s:,.0f} tokens/s" for s in (whole, calm))],
    ]
    price = story.options.gpu_hour_price
    if price is not None:
        dollars = [summary.verdict().storage_dollars or 0.0 for summary in (whole, calm)]
        rows.append([f"storage, at ${price:g} an hour", *(f"${d:.4f}" for d in dollars)])
    unit = "GPU" if story.device == "cuda" else "rank"
    page.table(
        f"Where the time of all {unit}s went",
        ["", "all steps", "without the outage made on purpose"],
        rows,
    )


def _storage(page: Page, story: Story) -> None:
    rows = [list(row) for row in checkpoint_rows(story)]
    parts = [table(["step", "size", "stall of training", "until durable", "fate"], rows)]
    restore = story.restore()
    if restore is not None:
        size = next(
            (save["bytes"] for save in story.saves() if save["step"] == restore["step"] and save["committed"]), None
        )
        text = f"Restored from step {restore['step']} on {ranks(story.options.resume_ranks)} in "
        text += format_seconds(restore["seconds"])
        if size:
            text += f": {format_bytes(size)}, {format_bytes(size / restore['seconds'])}/s, every block verified"
        parts.append(f'<p class="quiet">{text}.</p>')
    often = f"One every {story.options.scale.save_every} steps, far more often than a real job saves."
    note = f"Saved asynchronously: training goes on, and changes the parameters, meanwhile. {often}"
    page.section("Checkpoints", *parts, note=note)
    if story.model:
        model = story.model
        page.table(
            "Model",
            ["", "seconds", "rate"],
            [
                [name, format_seconds(model[key]), f"{format_bytes(model['length_bytes'] / max(model[key], 1e-9))}/s"]
                for name, key in (
                    ("read from the checkpoint", "checkpoint_read_s"),
                    ("published as safetensors", "publish_s"),
                    ("read back with headrace", "read_s"),
                )
            ],
            note=f"{model['name']}: {model['tensors']} tensors, {format_bytes(model['length_bytes'])}, "
            f"from step {model['step']}.",
        )


def _dataset(story: Story) -> dict[str, str]:
    facts = {
        "corpus": story.corpus,
        "tokens": f"{story.token_count:,} of {story.token_bytes} bytes, vocabulary {story.vocabulary:,}, "
        f"ingested in {format_seconds(story.ingest_s)}",
    }
    for index, uri in enumerate(story.volume.get("uris", [])):
        facts[f"member {index}"] = uri
    if story.volume:
        facts["stripe"] = format_bytes(story.volume["stripe_bytes"])
    facts["whole demo"] = format_seconds(story.ended - story.began)
    return facts
