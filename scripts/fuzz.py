"""Explore the receive paths with libFuzzer.

    python3 scripts/fuzz.py 60                 every target for 60 seconds, one after the other
    python3 scripts/fuzz.py 600 target_bytes   some of them
    python3 scripts/fuzz.py --minimise         cut the kept corpus (native/fuzz/corpus) to what adds coverage
    python3 scripts/fuzz.py --keep FILE NAME   put an input into the kept corpus of one target

The kept corpus of a target is one file: each input with its length before it (4 bytes, little-endian). What a run finds
worth keeping goes to target/fuzz/corpus/NAME and is used by the next run; an input that breaks an invariant goes to
target/fuzz/NAME-crash-... and the command that repeats it is printed. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "native/fuzz/corpus"
BUILT = ROOT / "target/fuzz"
TARGETS = ("wire", "target_bytes", "target_commands", "host_queue", "host_facts", "host_bringup")
#: Instrumentation of stable rustc for libFuzzer: what cargo-fuzz sets, but for the sanitizers that need a nightly.
FLAGS = (
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    *(
        f"-Cllvm-args=-sanitizer-coverage-{one}"
        for one in ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
    ),
    "-Cdebug-assertions=on",
    "-Coverflow-checks=on",
    "-Ccodegen-units=16",
)
#: Longer inputs only make it slower: a write of a few blocks is as good as one of many.
LONGEST = {"wire": 4200, "target_bytes": 8192, "host_facts": 1024, "host_bringup": 512}


class CannotFuzz(Exception):
    """This machine cannot build the fuzzers; the text says why."""


def host_triple() -> str:
    answer = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=False)
    found = re.search(r"^host: (\S+)$", answer.stdout, re.M)
    if not found:
        raise CannotFuzz("rustc does not say for which machine it compiles")
    return found[1]


def build(*, quick: bool = False) -> Path:
    """The folder with one program a target. `quick`: built with a third less, for runs of a few seconds."""
    if not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
        raise CannotFuzz("libFuzzer needs a C++ compiler (g++)")
    triple = host_triple()
    # With --target, build scripts and procedural macros are left without the instrumentation.
    command = ["cargo", "build", "--release", "--quiet", "-p", "headrace-fuzz", "--features", "libfuzzer", "--bins"]
    command += ["--target", triple, "--target-dir", str(BUILT)]
    # Link-time optimisation takes most of the time and finds nothing.
    env = {**os.environ, "RUSTFLAGS": " ".join(FLAGS), "CARGO_PROFILE_RELEASE_LTO": "off"}
    if quick:
        # What broke is named with its place all the same. CXXFLAGS: libFuzzer itself.
        env |= {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "1", "CARGO_PROFILE_RELEASE_DEBUG": "none", "CXXFLAGS": "-O0"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise CannotFuzz(answer.stderr)
    return BUILT / triple / "release"


def explore(program: Path, seconds: int, extra: list[str]) -> tuple[int, str]:
    """Run one target; gives the exit status and what it said."""
    name = program.name
    found = BUILT / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    command = [
        str(program),
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST.get(name, 4096)}",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-use_value_profile=0",
        "-print_final_stats=1",
        f"-artifact_prefix={BUILT}/{name}-",
        *extra,
        str(found),
        str(unpacked(name)),
    ]
    answer = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return answer.returncode, answer.stderr.decode(errors="replace")


def kept(name: str) -> list[bytes]:
    """The inputs of a target's kept corpus."""
    path = KEPT / name
    data = path.read_bytes() if path.exists() else b""
    inputs, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        inputs.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return inputs


def keep(name: str, inputs: list[bytes]) -> None:
    ordered = sorted(set(inputs), key=lambda one: (len(one), one))
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / name).write_bytes(b"".join(len(one).to_bytes(4, "little") + one for one in ordered))
    print(f"{name}: {len(ordered)} inputs, {(KEPT / name).stat().st_size} bytes")


def unpacked(name: str) -> Path:
    """The kept corpus as libFuzzer reads it: a folder with a file an input."""
    folder = BUILT / "kept" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, one in enumerate(kept(name)):
        (folder / f"{number:05}").write_bytes(one)
    return folder


def minimise(program: Path) -> None:
    """Keep of all that was found what adds coverage, smallest first."""
    name = program.name
    merged = BUILT / "merged" / name
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    found = BUILT / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    command = [str(program), "-merge=1", f"-max_len={LONGEST.get(name, 4096)}", "-timeout=20"]
    command += [str(merged), str(unpacked(name)), str(found)]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    keep(name, [path.read_bytes() for path in merged.iterdir()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=int, nargs="?", default=60, help="for each target")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all when none is named")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("--keep", nargs=2, metavar=("FILE", "NAME"))
    arguments = parser.parse_args()
    if arguments.keep:
        file, name = arguments.keep
        if name not in TARGETS:
            parser.error(f"no such target: {name}; there are {', '.join(TARGETS)}")
        keep(name, [*kept(name), Path(file).read_bytes()])
        return 0
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    try:
        built = build()
    except CannotFuzz as error:
        print(f"cannot fuzz here: {error}", file=sys.stderr)
        return 2
    failed = 0
    for name in arguments.targets or TARGETS:
        if arguments.minimise:
            minimise(built / name)
            continue
        status, said = explore(built / name, arguments.seconds, [])
        runs = re.search(r"stat::number_of_executed_units:\s+(\d+)", said)
        coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said)
        last = coverage[-1] if coverage else ("?", "?", "?")
        print(f"{name}: {runs[1] if runs else '?'} runs, {last[0]} edges, {last[2]} inputs")
        if status:
            failed = 1
            artefact = re.search(r"Test unit written to (\S+)", said)
            print(said[-6000:])
            if artefact:
                print(f"repeat: {built / name} {artefact[1]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
