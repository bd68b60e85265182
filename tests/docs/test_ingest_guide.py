"""What the guide to ingest tells is there, and what it shows runs."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import typer

from headrace.cli import main
from headrace.cli.app import app
from headrace.volume import Volume
from tests.dataset.corpora import texts

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "ingest.md"


def _write(path: Path, found: list[str]) -> None:
    """The same documents, as the suffix says."""
    kind, _, packed = path.name.partition(".")[2].partition(".")
    if kind in ("parquet", "arrow"):
        table = pyarrow.table({"text": found})
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        return
    lines = kind in ("jsonl", "ndjson", "json")
    data = ("".join(json.dumps({"text": text}) + "\n" for text in found) if lines else "\n".join(found)).encode()
    if packed == "gz":
        data = gzip.compress(data)
    elif packed == "zst":
        data = pyarrow.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)


def test_every_kind_that_is_told_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of the table with text: first the suffixes, then those of packed files."""
    names = []
    for row in re.findall(r"^\| (`\.(?:txt|jsonl|parquet).*?) \| a document", GUIDE.read_text(), re.M):
        plain, _, packed = row.partition("also")
        kinds = re.findall(r"`\.([a-z]+)`", plain)
        packings = re.findall(r"`\.(gz|zst)`", packed)
        more = ["json"] if "`.json`" in packed else []
        names += [*kinds, *(f"{kind}.{each}" for kind in [*kinds, *more] for each in packings)]
    assert {"txt", "py.gz", "jsonl", "json.zst", "parquet", "arrow"} <= set(names) and len(names) == 22
    folder = tmp_path / "texts"
    folder.mkdir()
    found = texts(3)
    for name in names:
        _write(folder / f"a.{name}", found)
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=16MiB"]).close()
    assert main(["ingest", str(folder), "a", "-V", uri, "--vocab-size", "300", "--workers", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    whole = sum(name.partition(".")[0] in ("txt", "md", "rst", "py") for name in names)
    assert said["documents"] == whole + 3 * (len(names) - whole) and said["ignored_files"] == 0


def test_the_python_that_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(2101):
            member = tarfile.TarInfo(f"a/{number:02}.jpg")
            member.size = 2
            tar.addfile(member, io.BytesIO(number.to_bytes(2, "little")))
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=16MiB"]).close()
    assert main(["ingest", "--records", str(tmp_path / "a.tar"), "images", "-V", uri, "--workers", "1"]) == 0
    code = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)[0]
    names: dict[str, object] = {"URIS": [uri]}
    exec(compile(code, str(GUIDE), "exec"), names)
    assert bytes(names["record"]["jpg"]) == (2100).to_bytes(2, "little")  # type: ignore[index]
    assert names["number"] == 17
    capsys.readouterr()
    assert main(["dataset", "ls", uri]) == 0
    assert capsys.readouterr().out.split("\t")[:3] == ["2,101", "-", "records"]


def test_the_options_that_are_told_are_there() -> None:
    command = typer.main.get_command(app).commands["ingest"]  # type: ignore[attr-defined]
    known = {option for given in command.params for option in given.opts}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", GUIDE.read_text()))
    assert len(told) > 6 and told <= known
