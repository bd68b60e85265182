"""The end of the demo on the terminal."""

from __future__ import annotations

from headrace.demo.proof import claims
from headrace.demo.story import Story
from headrace.demo.tell import Teller
from headrace.units import format_bytes, format_seconds


def print_summary(story: Story, teller: Teller) -> None:
    teller.title(8, "summary")
    whole, calm = story.summary(), story.undisturbed()

    def percent(value: float) -> str:
        return f"{value * 100:.2f} %"

    teller.table(
        "Accelerator time",
        ["", "all steps", "without the outage made on purpose"],
        [
            ["data wait", percent(whole.data_wait_share), percent(calm.data_wait_share)],
            ["checkpoint stall", percent(whole.checkpoint_share), percent(calm.checkpoint_share)],
            ["restore", percent(whole.restart_share), percent(calm.restart_share)],
            ["storage", percent(whole.storage_share), percent(calm.storage_share)],
            ["step, median", format_seconds(whole.step_p50_s), format_seconds(calm.step_p50_s)],
            ["throughput", f"{whole.tokens_per_s:,.0f} tokens/s", f"{calm.tokens_per_s:,.0f} tokens/s"],
        ],
    )
    teller.table(
        "Checkpoints", ["step", "size", "stall", "until durable", "fate"], [list(row) for row in checkpoint_rows(story)]
    )
    teller.table(
        "Proof", ["", "claim", "finding"], [["ok" if c.holds else "NO", c.text, c.finding] for c in claims(story)]
    )
    teller.console.print()
    teller.line(story.verdict().sentence, "bold")
    teller.line(outage_sentence(story))


def checkpoint_rows(story: Story) -> list[tuple[str, str, str, str, str]]:
    """Step, size, stall of training, seconds until it was durable, what became of it."""
    rows = []
    for save in story.saves():
        if save["committed"]:
            fate = "committed"
            if save["rewritten_bytes"]:
                fate += f", {format_bytes(save['rewritten_bytes'])} written again"
        elif story.rank_kill is not None and save["step"] == story.rank_kill.step and save["phase"] == "first":
            fate = "rank killed: " + ("committed" if story.rank_kill.committed else "nothing visible")
        else:
            fate = "given up, nothing visible"
        rows.append(
            (
                str(save["step"]),
                "" if save["bytes"] is None else format_bytes(save["bytes"]),
                "" if save["staged_s"] is None else format_seconds(save["staged_s"]),
                "" if save["seconds"] is None else format_seconds(save["seconds"]),
                fate,
            )
        )
    return rows


def outage_sentence(story: Story) -> str:
    """What the faults that the demo made cost."""
    parts = []
    if story.outages:
        dead = sum(outage.seconds for outage in story.outages)
        parts.append(
            f"The target was dead for {dead:.1f} s; until the checkpoint under way was through, training waited "
            f"{story.outage_stall_s():.1f} s for storage."
        )
    recovery = story.recovery_s()
    if recovery is not None and story.comparison is not None:
        twice = len(story.comparison.trained_twice)
        parts.append(
            f"From the kill of a rank to the next step it took {recovery:.1f} s, mostly starting processes; "
            f"{twice} step{'s were' if twice != 1 else ' was'} trained again."
        )
    return " ".join(parts)
