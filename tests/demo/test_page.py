"""Summary and page from a story that was made up, so that every branch is drawn."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.accidents.target import Life
from headrace.demo.compare import compare, proofs
from headrace.demo.events import Event
from headrace.demo.options import DemoOptions
from headrace.demo.page import build
from headrace.demo.proof import claims
from headrace.demo.story import Outage, Phase, RankKill, Story
from headrace.demo.summary import print_summary
from headrace.demo.tell import Teller
from headrace.measure import StepRecord

T = 1_735_689_600.0


def make_phase(name: str, ranks: int, began: float, steps: range, *, lost: int = -1, save: bool = True) -> Phase:
    """Steps of half a second, a checkpoint every six; the one of step `lost` is never committed."""
    phase = Phase(name=name, ranks=ranks, began=began)
    now = began + 6.0
    for step in steps:
        stalled = 1.5 if (name, step) == ("first", 12) else 0.001
        saving = save and (step + 1) % 6 == 0
        for rank in range(ranks):
            phase.records.append(
                StepRecord(
                    rank=rank,
                    step=step,
                    started_s=now,
                    data_wait_s=stalled,
                    compute_s=0.5,
                    checkpoint_s=0.1 if saving else 0.0,
                    restart_s=0.3 if name == "resumed" and step == steps[0] else 0.0,
                    tokens=2048 // ranks,
                    notes={"loss": 9 - math.log(step + 1), "samples": [f"{step * 8 + rank * 8 // ranks:064x}"]},
                )
            )
        now += stalled + 0.5
        if saving:
            details = {"seconds": 0.4, "total_bytes": 40_000_000, "rewritten_bytes": 7 << 20 if step == 11 else 0}
            phase.events.append(Event(t=now, rank=0, pid=1, event="save-begun", step=step + 1))
            phase.events.append(Event(t=now + 0.05, rank=0, pid=1, event="write-begun", step=step + 1))
            now += 0.1
            phase.events.append(
                Event(t=now, rank=0, pid=1, event="save-staged", step=step + 1, details={"seconds": 0.1})
            )
            if step + 1 != lost:
                phase.events.append(
                    Event(t=now + 0.3, rank=0, pid=1, event="save-committed", step=step + 1, details=details)
                )
    phase.ended = now
    return phase


@pytest.fixture
def story() -> Story:
    story = Story(options=DemoOptions(gpu_hour_price=3.0), began=T)
    story.first = make_phase("first", 1, T + 20, range(25), lost=24)
    story.resumed = make_phase("resumed", 1, story.first.ended + 5, range(18, 36))
    story.resumed.events.append(Event(t=T, rank=0, pid=1, event="restored", step=18, details={"seconds": 0.25}))
    story.reference = make_phase("reference", 1, story.resumed.ended, range(36), save=False)
    killed = next(e.t for e in story.first.events if e.step == 12) + 0.05
    story.outages = [
        Outage(step=12, killed=killed, back=killed + 2, recovered=killed + 2.1, committed=True, rewritten_bytes=7 << 20)
    ]
    kill = next(e.t for e in story.first.events if e.step == 24) + 0.05
    story.rank_kill = RankKill(
        step=24, rank=1, killed=kill, committed=False, checkpoints=[6, 12, 18], visible_objects=0
    )
    later = Life(began=killed + 2, ended=T + 999)
    story.lives = [Life(began=T, ended=killed), later]
    story.comparison = compare(*(proofs(p.records) for p in (story.reference, story.first, story.resumed)))
    story.model = {
        "name": "m", "step": 36, "length_bytes": 1000, "tensors": 3, "checkpoint_read_s": 0.1, "publish_s": 0.1,
        "read_s": 0.1, "headrace_bitwise": True, "safetensors_bitwise": True,
    }  # fmt: skip
    story.volume = {"uris": ["nvme+tcp://127.0.0.1:1/nqn.x:y?nsid=1"], "stripe_bytes": 1 << 20}
    story.token_bytes = 2
    story.ended = T + 100
    return story


def test_the_outage_is_told_apart_from_the_rest(story: Story) -> None:
    assert story.holds()
    assert story.outage_stall_s() == pytest.approx(1.5 + 0.1 + 0.002, abs=0.01)
    assert story.summary().data_wait_gpu_s == pytest.approx(story.undisturbed().data_wait_gpu_s + 1.5, abs=0.01)
    assert story.verdict().feeding_is_fine
    assert "not the bottleneck for feeding" in story.verdict().sentence
    assert "$" in story.verdict().sentence
    story.outages = []
    assert not story.verdict().feeding_is_fine


def test_the_page_is_whole_and_asks_nobody(story: Story) -> None:
    html = build(story).html().replace("\N{NO-BREAK SPACE}", " ")
    assert html.count('role="img"') == 3
    for text in (
        "target killed",
        "rank 1 killed",
        "resumed on 1",
        "nothing visible",
        "7.0 MiB written again",
        "250.0 ms",
    ):
        assert text in html
    assert "http:" not in html
    assert "https:" not in html
    assert "src=" not in html


def test_what_fails_is_told(story: Story) -> None:
    story.model["safetensors_bitwise"] = False
    assert story.comparison is not None
    story.comparison = replace(story.comparison, samples_differ=[7])
    assert not story.holds()
    assert [claim.holds for claim in claims(story)].count(False) == 2
    html = build(story).html()
    assert html.count("✗ fails") == 2
    assert "steps 7 differ" in html
    assert story.to_json()["comparison"]["samples_equal"] is False


def test_a_fault_that_left_something_behind_is_told(story: Story) -> None:
    assert story.rank_kill is not None
    story.rank_kill = replace(story.rank_kill, visible_objects=1)
    assert not story.rank_kill_holds()
    story.rank_kill = replace(story.rank_kill, visible_objects=0, checkpoints=[6, 18])
    assert story.rank_kill_holds()
    assert not story.outage_holds(story.outages[0])
    assert not story.holds()


def test_the_summary_is_json_and_lines(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    again = json.loads(json.dumps(story.to_json()))
    assert again["rank_kill"]["resume_step"] == 18
    assert [save["committed"] for save in again["saves"]] == [True, True, True, False, True, True, True]
    with Teller() as teller:
        print_summary(story, teller)
    said = capsys.readouterr().out
    assert story.verdict().sentence in said
    assert "rank killed: nothing visible" in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 3},
        {"ranks": 0},
        {"steps": 10},
        {"gpu_hour_price": -1.0},
        {"gpu_hour_price": float("nan")},
        {"gpu_hour_price": float("inf")},
        {"report": Path("/tmp")},
        {"corpus": Path("/does/not/exist")},
        {"tokenizer": Path("/does/not/exist")},
        {"report": Path("/does/not/exist/report.html")},
        {"keep": Path("/proc")},
    ],
)
def test_options_are_checked_before_anything_starts(wrong: dict[str, object]) -> None:
    from headrace.errors import UsageError

    with pytest.raises(UsageError):
        DemoOptions(**wrong)  # type: ignore[arg-type]


def test_a_package_that_is_missing_is_named() -> None:
    from headrace.demo.run import check_packages
    from headrace.errors import UsageError

    check_packages()
    with pytest.raises(UsageError, match=r"not installed: headrace_never_was; pip install 'headrace\[all\]'"):
        check_packages(["torch", "headrace_never_was"])
