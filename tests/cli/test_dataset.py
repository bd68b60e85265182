"""`headrace dataset`: what it shows of datasets, what it stores beside them, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.volume import Volume
from tests.dataset.corpora import put_stream, some_lengths

LENGTHS = [*some_lengths(80, 20), 1, 200]


class Case:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri = f"file:{folder}/a.img"
        self._capsys = capsys
        with Volume.create(f"{self.uri}?create=16MiB") as volume:
            put_stream(volume, "corpus", LENGTHS)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        status = main(["dataset", *arguments, "--volume", self.uri])
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def good(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status == 0, err
        return out

    def refused(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status in (1, 2) and not out
        (line,) = err.splitlines()
        assert line.startswith("headrace: error: ")
        return line


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    return Case(tmp_path, capsys)


def test_pack(case: Case) -> None:
    said = json.loads(case.good("pack", "corpus", "--sequence-length", "31", "--json"))
    assert (said["name"], said["documents"], said["left_out_documents"]) == (
        "corpus.packed-31",
        len(LENGTHS),
        sum(length < 2 for length in LENGTHS),
    )
    assert 0.9 < said["fill"] <= 1
    assert "corpus.padded-31" in case.good("pack", "corpus", "-l", "31", "--layout", "padded", "--long", "drop")
    assert "--replace" in case.refused("pack", "corpus", "-l", "31")
    assert "corpus.packed-31" in case.good("pack", "corpus", "-l", "31", "--replace")
    assert "sequence_length" in case.refused("pack", "corpus", "-l", "0")
    assert "nobody.bin" in case.refused("pack", "nobody", "-l", "31")
    assert "--long" in case.refused("pack", "corpus", "-l", "31", "--long", "keep")
