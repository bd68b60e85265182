"""From a fresh clone to a working environment: .venv, packages, native module. Standard library only.

    python3 scripts/ready.py                    make everything ready; instant when nothing changed
    python3 scripts/ready.py --run PROGRAM ...  then replace this process by PROGRAM, with cargo on its PATH

Each phase writes a stamp into .venv with a digest of what it depends on, so that a second run does nothing.
The output of the tools goes to .venv/ready.log and is shown where a phase fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "ready.log"
MINIMUM_PYTHON = (3, 10)
MINIMUM_CARGO = (1, 85)
#: For pip: of ten thousand modules those that are used are compiled, when they are, where Python may keep that.
LAZILY = [] if sys.dont_write_bytecode else ["--no-compile"]


def fail(*lines: str) -> None:
    print("\n".join(("headrace: cannot get ready", *("  " + line for line in lines))), file=sys.stderr)
    sys.exit(1)


# ---- what the machine must have -----------------------------------------------------------------------------------


def cargo_environment() -> dict[str, str]:
    """The environment in which `cargo` works, also where HOME is not the home that rustup was installed in."""
    environment = dict(os.environ)
    homes = [Path.home(), Path(pwd.getpwuid(os.getuid()).pw_dir)]
    search = os.pathsep.join([environment.get("PATH", os.defpath), *(str(home / ".cargo/bin") for home in homes)])
    cargo = shutil.which("cargo", path=search)
    if cargo is None:
        fail(
            "cargo (Rust) was not found; the native engine is built from source",
            "install Rust 1.85 or newer: https://rustup.rs, or your distribution's `cargo` package",
        )
    assert cargo is not None
    environment["PATH"] = os.pathsep.join([str(Path(cargo).parent), environment.get("PATH", os.defpath)])
    # rustup's cargo is a shim that looks for its toolchains under HOME; tell it where they are when HOME has moved.
    for rustup in (None, Path(cargo).parent.parent.parent / ".rustup", *(home / ".rustup" for home in homes)):
        if rustup is not None:
            if not rustup.is_dir():
                continue
            environment["RUSTUP_HOME"] = str(rustup)
        answer = subprocess.run([cargo, "--version"], env=environment, capture_output=True, text=True, check=False)
        found = re.match(r"cargo (\d+)\.(\d+)", answer.stdout)
        if answer.returncode == 0 and found:
            version = int(found[1]), int(found[2])
            if version < MINIMUM_CARGO:
                fail(f"cargo {found[1]}.{found[2]} is too old: 1.85 or newer is needed", "`rustup update`")
            return environment
    fail(f"{cargo} does not run:", *answer.stderr.strip().splitlines()[:3])
    raise AssertionError


def check_machine() -> None:
    if sys.version_info < MINIMUM_PYTHON:
        fail(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}", "make PYTHON=python3.12 ...")
    if sys.platform != "linux":
        fail(f"headrace runs on Linux, this is {sys.platform}")
    if not shutil.which(os.environ.get("CC", "cc")):
        fail("no C compiler (cc) was found; Rust links with it", "install gcc or clang, for example `build-essential`")
    try:
        import ensurepip  # noqa: F401  (only asked for)
        import venv  # noqa: F401
    except ImportError as error:
        fail(f"this Python has no {error.name}", "install it, for example `python3-venv`")


# ---- phases -------------------------------------------------------------------------------------------------------


def digest(*paths: Path, salt: str = "") -> str:
    total = hashlib.sha256(f"{sys.version}{salt}".encode())
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                total.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def phase(
    title: str, *commands: list[str], env: dict[str, str] | None = None, after: subprocess.Popen[bytes] | None = None
) -> None:
    """Run the commands, one line on the screen: what, how long, and on a terminal the tool's own last line.
    `after`: what has to end before."""
    begun = time.monotonic()
    terminal = sys.stdout.isatty()
    again = "\r\x1b[K" if terminal else ""  # back to the start of the line, and empty it
    print(f"  {title} ...", end="" if terminal else "\n", flush=True)
    if after is not None:
        after.wait()
    with LOG.open("a") as log:
        for command in commands:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            with subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process:
                assert process.stdout is not None
                tail: list[str] = []
                for line in process.stdout:
                    log.write(line)
                    tail = [*tail[-39:], line.rstrip()]
                    if terminal:
                        print(
                            f"{again}  {title} ... {time.monotonic() - begun:3.0f} s  {line.strip()[:70]}",
                            end="",
                            flush=True,
                        )
            if process.returncode:
                print(again, end="")
                fail(f"{title}: `{' '.join(command)}` failed:", *tail, f"(the whole output: {LOG.relative_to(ROOT)})")
    print(f"{again}  {title}: {time.monotonic() - begun:.0f} s", flush=True)


def done(name: str, key: str) -> bool:
    stamp = VENV / f".ready-{name}"
    return stamp.exists() and stamp.read_text() == key


def mark(name: str, key: str) -> None:
    (VENV / f".ready-{name}").write_text(key)


def development_packages() -> list[str]:
    """Requirements of the project and its `dev` group (tomllib is of Python 3.11, groups are of pip 25.1)."""
    text = (ROOT / "pyproject.toml").read_text()
    wanted: list[str] = []
    for pattern in (r"^dependencies = \[(.*?)\]", r"^dev = \[(.*?)\]"):
        found = re.search(pattern, text, re.M | re.S)
        if not found:
            fail(f"pyproject.toml has no list that matches {pattern!r}")
            raise AssertionError
        body = re.sub(r"#.*", "", found[1])
        wanted += re.findall(r'"([^"]+)"', body)
    return wanted


def make_ready() -> dict[str, str]:
    check_machine()
    environment = cargo_environment()
    environment.pop("PYTHONHOME", None)
    environment.update(VIRTUAL_ENV=str(VENV), PIP_DISABLE_PIP_VERSION_CHECK="1")
    environment["PATH"] = os.pathsep.join([str(VENV / "bin"), environment["PATH"]])
    python = str(VENV / "bin/python")
    VENV.mkdir(exist_ok=True)
    with (VENV / ".ready-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = development_packages()
        package_key = digest(salt=" ".join(packages))
        native_key = digest(
            ROOT / "native", ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "pyproject.toml", salt=package_key
        )
        built = any((ROOT / "src/headrace").glob("_native*.so"))
        if done("packages", package_key) and done("native", native_key) and built:
            return environment
        print("headrace: getting ready (once)", flush=True)
        native = [str(VENV / "bin/maturin"), "develop", "--release"]
        ahead: subprocess.Popen[bytes] | None = None
        if not done("packages", package_key):
            if not (VENV / "bin/pip").exists():
                phase("virtual environment", [sys.executable, "-m", "venv", str(VENV)])
            install = [python, "-m", "pip", "install", "--progress-bar", "off", *LAZILY]
            builder = [package for package in packages if package.startswith("maturin")]
            phase("pip and maturin", [*install, "--upgrade", "pip"], [*install, *builder], env=environment)
            # It compiles while packages come, just as below, where it says what it has to say.
            ahead = subprocess.Popen(
                [*native, "--skip-install"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                phase("packages (PyTorch is the large one)", [*install, *packages], env=environment)
            except BaseException:
                ahead.terminate()
                ahead.wait()
                raise
            mark("packages", package_key)
        phase("native engine (Rust, release build)", native, env=environment, after=ahead)
        mark("native", native_key)
    return environment


def main() -> None:
    environment = make_ready()
    if sys.argv[1:2] == ["--run"]:
        command = sys.argv[2:]
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            fail(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
