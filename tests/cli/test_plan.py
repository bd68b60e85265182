"""`headrace plan` and `headrace providers`: what they print, and that bad input is one line and exit status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli import main
from headrace.plan.fields import FIELDS

JOB = ["--gpus", "64", "--parameters", "8.03B"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    assert status == 2, (status, out[:200], err)
    assert not out and err.count("\n") == 1 and err.startswith("headrace: error: ") and len(err) < 1500
    return err


def test_a_table_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", *JOB)
    assert out.startswith("Storage is not your problem")
    for title in ("How large is a checkpoint?", "What is there?", "How fast must data come?", "How often to save",
                  "How fast must a restart load?", "Which NICs", "How much of the time trains?", "How much room",
                  "What was assumed"):  # fmt: skip
        assert title in out
    assert "parameters * (weight bytes + state bytes)" in out and "112.4 GB" in out and "[Young" not in out


def test_on_a_terminal_the_sentence_is_still_there_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "plan", *JOB).count("Nothing needs to change.") == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = run(capsys, "plan", *JOB)
    assert out.startswith("Storage is not your problem") and out.endswith("Nothing needs to change.\n")


def test_what_is_nearly_right_is_answered_with_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", *JOB, "--provider", "aws/fsx")
    assert "aws has no such offering" in said and "aws/fsx-lustre" in said and "vultr" not in said
    assert "for example provider=aws" in refused(capsys, "providers", "--filter", "aws")


def test_json_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    told = json.loads(run(capsys, "plan", *JOB, "--json", "--html", str(page), "--gpu-hour-price", "2.5"))
    assert told["verdict"]["nothing_to_change"] is True
    assert {question["question"] for question in told["questions"]} == {
        "model", "storage", "feeding", "saves", "restarts", "network", "goodput", "money"
    }  # fmt: skip
    for question in told["questions"]:
        for answer in question["answers"]:
            assert answer["source"] and answer["formula"]
            assert answer["value"]["low"] <= answer["value"]["likely"] <= answer["value"]["high"]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_example_is_a_job_with_every_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = run(capsys, "plan", "--example")
    for field in FIELDS:
        assert field.about in example
    (tmp_path / "job.toml").write_text(example)
    said = json.loads(run(capsys, "plan", "--job", str(tmp_path / "job.toml"), "--json"))
    assert said == json.loads(run(capsys, "plan", *JOB, "--json"))
    # What is assumed is what the file says is assumed.
    defaults = [line.removeprefix("# ") for line in example.splitlines()]
    given = [field.key.rpartition(".")[2] for field in FIELDS if field.default is not None]
    lines = [line if any(line.startswith(f"{name} = ") for name in given) else f"# {line}" for line in defaults]
    kept = [
        line.removeprefix("# ") if line.startswith(("# [", "# gpus =", "# parameters =")) else line for line in lines
    ]
    (tmp_path / "all.toml").write_text("\n".join(kept))
    every = json.loads(run(capsys, "plan", "--job", str(tmp_path / "all.toml"), "--json"))
    assert every["verdict"]["storage_share"]["likely"] == said["verdict"]["storage_share"]["likely"]
    assert len(every["assumed"]) < len(said["assumed"])


def test_options_go_before_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('gpus = 8\n[model]\nparameters = "70B"\n[storage]\nread = ["1GB/s", "2GB/s"]\n')
    out = run(capsys, "plan", "--job", str(tmp_path / "job.toml"), "--gpus", "16", "--set", "feed.token_bytes=2")
    assert "980 GB" in out and "16 gpu" in out and "bytes of a token = 2 B/token" in out
    assert "1.5 GB/s (1 to 2)" in out


def test_a_config_beside_its_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.toml").write_text('gpus = 8\n[model]\nconfig = "config.json"\n')
    assert "8,030,261,248 parameters" in run(capsys, "plan", "--job", str(tmp_path / "job.toml"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert "one of llama" in refused(capsys, "plan", "--job", str(tmp_path / "job.toml"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": -4}))
    assert "hidden_size" in refused(capsys, "plan", "--job", str(tmp_path / "job.toml"))
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "JSON" in refused(capsys, "plan", "--job", str(tmp_path / "job.toml"))


@pytest.mark.parametrize(
    "options",
    [
        [], ["--gpus", "0", "--parameters", "8B"], ["--gpus", "-8", "--parameters", "8B"],
        ["--gpus", "nan", "--parameters", "8B"], ["--gpus", "8.5", "--parameters", "8B"],
        ["--gpus", "1e400", "--parameters", "8B"], ["--gpus", "8", "--parameters", "1e400"],
        ["--gpus", "8", "--parameters", "inf"], ["--gpus", "8", "--parameters", "many"],
        ["--gpus", "99999999999", "--parameters", "8B"], [*JOB, "--interval", "-3min"], [*JOB, "--interval", "soon"],
        [*JOB, "--read", "fast"], [*JOB, "--read", "3GB/s..1GB/s"], [*JOB, "--read", "0"], [*JOB, "--tp", "3"],
        [*JOB, "--provider", "nobody"], [*JOB, "--provider", "aws"], [*JOB, "--provider", "aws/fsx-lustre"],
        [*JOB, "--set", "feed.tokens"], [*JOB, "--set", "feed.tokans=3"], [*JOB, "--set", "gpus=3"],
        [*JOB, "--sharding", "zero9"], [*JOB, "--gpu-hour-price", "-1"], [*JOB, "--catalogue", "/nowhere/at-all.toml"],
        ["--job", "/nowhere/at-all.toml"], [*JOB, "--set", "model.states=fp32,fp64"], ["--provider", "aws/fsx-lustre"],
        [*JOB, "--set", "goals.lost=70%"], [*JOB, "--read", "1" * 400], [*JOB, "--config", "\udcff"],
    ],
)  # fmt: skip
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "plan", *options)


@pytest.mark.parametrize(
    "text",
    [
        "gpus = 8", "gpus = -1\n[model]\nparameters = 8e9", "gpus = nan\n[model]\nparameters = 8e9",
        "gpus = 1e400\n[model]\nparameters = 8e9", "gpus = 8\n[model]\nparameters = 1e400",
        "gpus = 8\n[model]\nparameters = true", "gpus = 8\nnodes = 1\n[model]\nparameters = 8e9",
        "gpus = 8\n[model]\nparametres = 8e9", "gpus = 8\n[modle]\nparameters = 8e9", "gpus = 8\nmodel = 3",
        "gpus = [8, 4]\n[model]\nparameters = 8e9", "gpus = [[8]]\n[model]\nparameters = 8e9", "= = =", "\x00",
        "gpus = 8\n[model]\nparameters = {}", "gpus = 0x" + "f" * 6000 + "\n[model]\nparameters = 8e9",
        "gpus = " + "9" * 6000, "a = " + "[" * 5000, "gpus = 8\n[model]\nparameters = 1979-05-27",
        'gpus = 8\n[model]\nparameters = 8e9\nweights = "fp64"', "gpus = 8\n[model]\nparameters = 8e9\ntied = 1",
        "gpus = 8\n[model]\nparameters = 8e9\nstates = 4", "#" + "x" * (1 << 20),
        '"\\u001b[2J\\n" = 1',
    ],
)  # fmt: skip
def test_bad_files(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text)
    assert "job.toml" in refused(capsys, "plan", "--job", str(tmp_path / "job.toml")) or text == "gpus = 8"


def test_a_file_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b'gpus = 8\n[model]\nparameters = "\xff"\n')
    assert "not UTF-8 at" in refused(capsys, "plan", "--job", str(tmp_path / "job.toml"))
    refused(capsys, "plan", "--job", str(tmp_path))
    refused(capsys, "plan", *JOB, "--catalogue", str(tmp_path / "job.toml"))


_scalars = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.text(max_size=12),
    st.sampled_from(["8B", "1GB/s", "1GB/s..2GB/s", "30min", "bf16", "zero1", "0", "1e-300", "1e300"]),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.dictionaries(st.sampled_from([field.key for field in FIELDS]), _scalars, max_size=6))
def test_any_values_plan_or_are_told(values: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    given = {"gpus": 64, "model.parameters": "8B", **values}
    sets = [argument for key, value in given.items() for argument in ("--set", f"{key}={value}")]
    if any("\x00" in text for text in sets):
        return
    status = main(["plan", "--json", *sets])
    out, err = capsys.readouterr()
    assert status in (0, 2), err
    if status == 0:
        assert json.loads(out)["verdict"]["sentence"] and "NaN" not in out and "Infinity" not in out
    else:
        assert json.loads(err)["error"]["exit_status"] == 2


def test_providers(capsys: pytest.CaptureFixture[str]) -> None:
    every = run(capsys, "providers").splitlines()
    assert len(every) > 60 and all(line.count("\t") == 7 for line in every)
    tcp = run(capsys, "providers", "--filter", "transport=nvme-tcp")
    assert {line.split("\t")[0] for line in tcp.splitlines()} == {"coreweave/vast-block", "crusoe/disk"}
    assert "2023-08-01 (older than a year)" in tcp
    told = json.loads(run(capsys, "providers", "--json", "--filter", "provider=aws", "--filter", "kind=file system"))
    (lustre,) = told["providers"]
    assert lustre["name"] == "fsx-lustre" and all(
        claim["source"] and claim["date"] and claim["grade"] for claim in lustre["claims"]
    )
    for filter in ("transport", "transport=steam", "colour=red", "=", ""):
        refused(capsys, "providers", "--filter", filter)


def test_providers_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "providers")
    assert max(map(len, out.splitlines())) < 80 and out.count("\n") > 150
    # What all of an offering have in common is said once.
    entry = next(part for part in out.split("\n\n") if part.startswith("crusoe/disk: "))
    assert " ".join(entry.split()).count("2023-08-01 (older than a year)") >= 1
    assert run(capsys, "providers", "--example").startswith("# What somebody claims")
