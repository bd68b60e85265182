"""The claims of the demo, each with its finding: for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.demo.story import Story
from headrace.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    holds: bool
    finding: str


def claims(story: Story) -> list[Claim]:
    found = []
    comparison, kill, model = story.comparison, story.rank_kill, story.model
    for outage in story.outages:
        fate = (
            f"checkpoint {outage.step} committed complete, {format_bytes(outage.rewritten_bytes)} written again"
            if outage.committed
            else f"checkpoint {outage.step} given up, nothing of it visible"
        )
        found.append(
            Claim(
                text="Target killed during a checkpoint: training got no error, the checkpoint is whole or not there",
                holds=story.outage_holds(outage),
                finding=fate,
            )
        )
    if kill is not None:
        fate = (
            "had just been committed, whole"
            if kill.committed
            else f"is not there ({kill.visible_objects} objects of it visible)"
        )
        found.append(
            Claim(
                text="A rank was killed during a checkpoint: the job goes on from the last committed one",
                holds=story.rank_kill_holds(),
                finding=f"checkpoint {kill.step} {fate}; resumed from {kill.resume_step}",
            )
        )
    if comparison is not None:
        differ = [*comparison.samples_differ, *comparison.missing]
        found.append(
            Claim(
                text="The samples of every step are those of an undisturbed run (SHA-256 of the model's inputs)",
                holds=comparison.samples_equal,
                finding=f"all {comparison.steps} steps"
                if not differ
                else f"steps {', '.join(map(str, differ))} differ",
            )
        )
        found.append(
            Claim(
                text="Loss on the same number of ranks: equal bit for bit",
                holds=comparison.losses_bitwise,
                finding=f"{comparison.same_ranks - len(comparison.same_ranks_differ)} of {comparison.same_ranks} steps",
            )
        )
        if comparison.other_ranks:
            found.append(
                Claim(
                    text=f"Loss on another number of ranks: within {comparison.tolerance:g} nats",
                    holds=comparison.losses_within_tolerance,
                    finding=f"at most {comparison.other_ranks_difference:.1e} in {comparison.other_ranks} steps",
                )
            )
    if model:
        for key, reader in (
            ("headrace_bitwise", "headrace"),
            ("safetensors_bitwise", "the safetensors library, after export"),
        ):
            found.append(
                Claim(
                    text=f"The published model, read with {reader}: equal bit for bit",
                    holds=bool(model[key]),
                    finding=f"{model['tensors']} tensors, {format_bytes(model['length_bytes'])}",
                )
            )
    return found
