"""The catalogue: every claim has a source, a date and a grade; files of users; what was measured against claims."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.plan import Measured, Range, compare, load_catalogue, units
from headrace.plan.catalogue import GRADES, Catalogue, Word
from headrace.plan.example import example_catalogue
from headrace.plan.expect import BELOW, CANNOT, MET, Here, read_measured

OWN = """
[[offering]]
provider = "mine"
name = "block"
kind = "block"
transport = ["nvme-tcp"]
source = "our contract"
date = "2026-10-01"
grade = "contract"

[[offering.claim]]
what = "read"
low = 20
unit = "GB/s"
per = "node"
bound = "at least"

[[offering.claim]]
what = "write"
high = 50
unit = "GB/s"
bound = "at most"
"""


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_every_claim_has_a_source_a_date_and_a_grade(catalogue: Catalogue) -> None:
    words = [one.word for one in catalogue.offerings] + [c.word for one in catalogue.offerings for c in one.claims]
    assert len(catalogue.offerings) > 25 and len(words) > 60
    for word in words:
        assert word.source and word.date and word.grade in GRADES
    assert len({one.provider for one in catalogue.offerings}) >= 15


def test_what_the_field_found(catalogue: Catalogue) -> None:
    """Two offerings alone were found to state NVMe/TCP; what a hypervisor presents is never called anything else."""
    by_transport = {one.key for one in catalogue.filtered(["transport=nvme-tcp"])}
    assert by_transport == {"coreweave/vast-block", "crusoe/disk"}
    for one in catalogue.filtered(["transport=pcie"]):
        assert one.seen in ("hypervisor-presented", "local")
    text = " ".join(str(claim) for one in catalogue.offerings for claim in one.claims)
    assert "400 GB/s" not in text  # No primary source was found.


@pytest.mark.parametrize(
    ("date", "today", "age"),
    [("2026-09-20", (2026, 11, 30), ""), ("2023-08-01", (2026, 11, 30), "older than a year"),
     ("2026", (2026, 11, 30), ""), ("2026", (2027, 1, 5), "older than a year"),
     ("unknown", (2026, 1, 1), "date unknown"),
     ("2026-06", (2027, 6, 1), ""), ("2026-06", (2027, 6, 3), "older than a year")],
)  # fmt: skip
def test_what_is_old_is_marked(date: str, today: tuple[int, int, int], age: str) -> None:
    assert Word(source="s", date=date, grade="blog").age(datetime.date(*today)) == age


def test_what_a_claim_is_worth(catalogue: Catalogue) -> None:
    nodes, gpus = Range.point(4, units.NODES), Range.point(32, units.GPUS)
    (dfs,), _ = catalogue.find("coreweave/dfs").rates("read", nodes=nodes, gpus=gpus, capacity=None)
    assert dfs.likely == 32 * 2**30 and dfs.origin == "claimed" and "marketing" in dfs.source
    lustre = catalogue.find("gcp/managed-lustre")
    capacity = Range.point(100 * 2.0**40, units.BYTES)
    (tiers,), _ = lustre.rates("write", nodes=nodes, gpus=gpus, capacity=capacity)
    assert (tiers.low, tiers.likely, tiers.high) == (12.5e9, 12.5e9, 100e9)
    with pytest.raises(UsageError, match="capacity"):
        lustre.rates("write", nodes=nodes, gpus=gpus, capacity=None)
    # A blog's figure is shown, and never counted.
    found, left_out = catalogue.find("aws/instance-store-p4d").rates("read", nodes=nodes, gpus=gpus, capacity=None)
    assert not found and "blog" in left_out[0]


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "config" / "headrace" / "providers"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(OWN)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert load_catalogue().find("mine").claims[0].low == 20
    # One that is named goes before it.
    (tmp_path / "later.toml").write_text(OWN.replace("low = 20", "low = 30"))
    assert load_catalogue([tmp_path / "later.toml"]).find("mine/block").claims[0].low == 30


def test_an_example_is_a_catalogue(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(example_catalogue())
    (one,) = (one for one in load_catalogue([tmp_path / "own.toml"]).offerings if one.provider == "ours")
    assert one.key == "ours/array" and [claim.what for claim in one.claims] == ["read", "capacity"]
    # What is commented out is right, too.
    lines = [
        line.removeprefix("# ") if re.match("# [a-z]+ = ", line) else line for line in example_catalogue().splitlines()
    ]
    (tmp_path / "own.toml").write_text("\n".join(lines).replace('"at least"', '"about"'))
    (one,) = (one for one in load_catalogue([tmp_path / "own.toml"]).offerings if one.provider == "ours")
    assert (one.title, one.claims[0].high, one.claims[0].per) == ("The array in row 4", 48, "node")


def test_what_people_write_first_is_understood(tmp_path: Path) -> None:
    """One transport is no list, and a date is a date."""
    text = OWN.replace('["nvme-tcp"]', '"nvme-tcp"').replace('"2026-10-01"', "2026-10-01")
    (tmp_path / "own.toml").write_text(text)
    found = load_catalogue([tmp_path / "own.toml"]).find("mine")
    assert found.transport == ("nvme-tcp",) and found.claims[0].word.date == "2026-10-01"
    for wrong in ("2026-10-01T00:00:00", "10:00:00", "20261001"):
        (tmp_path / "own.toml").write_text(OWN.replace('"2026-10-01"', wrong))
        with pytest.raises(UsageError, match="date"):
            load_catalogue([tmp_path / "own.toml"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('source = "our contract"\n', ""), r"offering\[0\].source"),
        (('grade = "contract"', 'grade = "hearsay"'), "measured or contract"),
        (('date = "2026-10-01"', 'date = "2026-13-01"'), "YYYY-MM-DD"),
        (("low = 20", "low = -1"), "a number from 0"),
        (("low = 20", "low = nan"), "a number from 0"),
        (("low = 20", "low = 1e400"), "a number from 0"),
        (("low = 20", "low = 20\nhigh = 10"), "at most high"),
        (('unit = "GB/s"\nper', 'unit = "USD"\nper'), "a unit of read"),
        (('bound = "at least"', 'bound = "at most"'), "high alone"),
        (('what = "read"', 'what = "read"\nspeed = 4'), "a key that nobody knows"),
        (('["nvme-tcp"]', '["carrier pigeon"]'), "a list of nvme-tcp"),
        (('provider = "mine"', 'provider = "Mine and Sons"'), "a short name"),
        (("low = 20\n", ""), "low, high, or both"),
        # Python's reader would take minutes.
        (("low = 20", "low = 20\n" + " . ".join("a" * 100_000) + " = 1"), "a key of too many parts"),
        (("low = 20", "low = 20\n" + "a" * 100_000 + " = 1"), r"a{57}\.\.\. at"),
    ],
)
def test_mistakes_in_it_are_told(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert change[0] in OWN
    (tmp_path / "own.toml").write_text(OWN.replace(*change, 1))
    with pytest.raises(UsageError, match=said):
        load_catalogue([tmp_path / "own.toml"])


def test_what_was_measured_against_what_was_claimed(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    offering = load_catalogue([tmp_path / "own.toml"]).find("mine")
    measured = read_measured(
        {"measured": [{"what": "read", "per": "node", "value": 12.4, "unit": "GB/s"}]}, file="report.json"
    )
    read, write = compare(offering, measured)
    assert (read.verdict, write.verdict) == (BELOW, CANNOT) and read.ratio == pytest.approx(0.62)
    assert "measured 12.4 GB/s per node, 62 % of what is claimed" in str(read)
    assert write.ratio is None
    assert compare(offering, [Measured(what="read", per="node", value=19.5e9)])[0].verdict == MET
    within, above = (compare(offering, [Measured(what="write", per="", value=value)])[1] for value in (31e9, 60e9))
    assert (within.verdict, within.why) == (MET, "a limit promises nothing: this is 62 % of it")
    assert above.verdict == MET and "more than the limit" in above.why
    with pytest.raises(UsageError, match="measured\\[0\\]"):
        read_measured({"measured": [{"what": "read", "value": "fast", "unit": "GB/s"}]}, file="report.json")


NODE = [Measured(what="read", per="node", value=8e9), Measured(what="iops", per="node", value=20_000.0)]


@pytest.mark.parametrize(
    ("claim", "here", "verdict", "why"),
    [
        ("low = 1\nper = 'gpu'", Here(gpus=8), MET, ""),
        ("low = 2\nper = 'gpu'", Here(gpus=8), BELOW, "50 % of the claim"),
        ("low = 2\nper = 'gpu'", Here(), CANNOT, "this node shows none"),
        ("low = 9\nper = 'device'", Here(devices=4), CANNOT, "made of 4"),
        ("low = 9\nper = 'device'", Here(), BELOW, "88.9 %"),
        # One node that has as much as all are promised shows it; one that has less shows nothing.
        ("low = 8", Here(), MET, ""),
        ("low = 40", Here(), CANNOT, "of all nodes together: 20 %"),
        ("low = 1\nper = 'TiB'", Here(), CANNOT, "the size is not known"),
        ("low = 1\nper = 'TiB'", Here(size_bytes=4 * 2.0**40), MET, ""),
        ("low = 1\nper = 'TiB'", Here(size_bytes=16 * 2.0**40), CANNOT, "of all nodes together: 50 %"),
        # A link that is full says nothing of what is behind it.
        ("low = 16\nper = 'node'", Here(link=9e9, link_name="eth0"), CANNOT, "eth0 with 72 Gbit/s, was full"),
        ("low = 16\nper = 'node'", Here(link=50e9, link_name="eth0"), BELOW, "50 %"),
        ("low = 16\nper = 'MiB/s'", Here(), CANNOT, "how much was bought"),
    ],
)
def test_what_one_node_says_of_a_claim(claim: str, here: Here, verdict: str, why: str, tmp_path: Path) -> None:
    head, _, _ = OWN.partition("[[offering.claim]]")
    text = f'{head}[[offering.claim]]\nwhat = "read"\nunit = "GB/s"\nbound = "at least"\n{claim}\n'
    (tmp_path / "own.toml").write_text(text)
    (found,) = compare(load_catalogue([tmp_path / "own.toml"]).find("mine"), NODE, here)
    assert found.verdict == verdict and why in found.why, found
    assert found.to_json(datetime.date(2028, 1, 1))["age"] == "older than a year"
