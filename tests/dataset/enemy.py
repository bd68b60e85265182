"""A parallel ingest in a bad world: `python -m tests.dataset.enemy [--rounds N] [--seed S]`. The tests do some rounds.

However often it is cut, refused or interrupted: it ends with its dataset, byte for byte, or with one error; nothing
half is visible, no worker stays, and the same call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from headrace.dataset import IngestOptions, IngestReport, ingest
from headrace.errors import DeviceError, NotFenced
from headrace.testing.serve import ServeProcess, serving
from headrace.volume import Volume
from tests.dataset.test_ingest import objects
from tests.dataset.test_ingest_workers import SLICE_BYTES, _workers_of, write_corpus
from tests.torch.way import Way

NQN = "nqn.2026-01.io.headrace:test-enemy"
#: The first PDU of a connection, as it should be; what follows it here never is.
_HELLO = bytes([0, 0, 128, 0, 128, 0, 0, 0]) + bytes(120)


def read(volume: Volume, corpus: Path, tokenizer: Path, workers: int = 2) -> IngestReport:
    """In many slices, with workers that write for themselves."""
    with volume.session(run_id="test", heartbeat_s=0.2, missed_beats=5) as session:
        options = IngestOptions(tokenizer=tokenizer, workers=workers, slice_bytes=SLICE_BYTES)
        return ingest(corpus, session, "a", options)


def check(uris: list[str], expected: dict[str, bytes]) -> None:
    with Volume.open(uris) as volume:
        assert objects(volume, "a") == expected
        assert not volume.any("a.ingest/")


def nothing_half(uris: list[str]) -> None:
    with Volume.open(uris) as volume:
        assert all(info.name.startswith(("a.ingest/", "filler")) for info in volume.list())
    assert not _workers_of(os.getpid())


# ---- the fabric ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def enemy(target: ServeProcess, way: Way, seed: int, acts: int) -> Iterator[None]:
    """Sends garbage to the target, and cuts the way to it, so many times; then it has had enough."""
    chance, over = random.Random(seed), threading.Event()

    def act() -> None:
        for _ in range(acts):
            if over.wait(chance.uniform(0.0, 0.1)):
                return
            kind = chance.randrange(4)
            if kind == 0:
                way.cut()
                way.heal()
                continue
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target.port), 2) as end:
                start = _HELLO[: chance.randrange(len(_HELLO) + 1)] if kind == 1 else _HELLO if kind == 2 else b""
                end.sendall(start + chance.randbytes(chance.randrange(3000)))

    thread = threading.Thread(target=act, name="enemy")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def over_a_bad_fabric(corpus: Path, tokenizer: Path, expected: dict[str, bytes], seed: int) -> None:
    with serving(NQN, "mem:16MiB", "mem:16MiB") as target, Way(target.port, seed) as way:
        there = [target.uri(nsid=nsid) for nsid in (1, 2)]
        Volume.create(there).close()
        uris = [uri.replace(f":{target.port}", f":{way.port}") for uri in there]
        with enemy(target, way, seed, 60):
            for _ in range(3):
                try:
                    with Volume.open(uris, write=True) as volume:
                        assert read(volume, corpus, tokenizer).direct
                    break
                except (DeviceError, NotFenced) as error:
                    # Cut where nobody tries again for long: where it is opened.
                    assert "\n" not in str(error)
                    nothing_half(there)
        with Volume.open(uris, write=True) as volume:
            if "a.json" not in volume:
                read(volume, corpus, tokenizer)
        check(there, expected)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

_CALL = """
import sys
from pathlib import Path
from headrace.volume import Volume
from tests.dataset.enemy import read

uri, corpus, tokenizer = sys.argv[1:]
print("begin", flush=True)
try:
    with Volume.open([uri], write=True) as volume:
        read(volume, Path(corpus), Path(tokenizer))
except KeyboardInterrupt:
    sys.exit(130)
"""


def interrupted(uri: str, corpus: Path, tokenizer: Path, expected: dict[str, bytes], rounds: int, seed: int) -> int:
    """Ctrl-C at moments by chance, until it is done; returns how often it was heard."""
    chance = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for number in range(rounds + 1):
        child = subprocess.Popen(
            [sys.executable, "-c", _CALL, uri, str(corpus), str(tokenizer)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        with child:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.readline() == "begin\n"
            workers: list[psutil.Process] = []
            if number < rounds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(chance.uniform(0.0, 4.0))
                with contextlib.suppress(psutil.Error):
                    workers = _workers_of(child.pid)
                child.send_signal(signal.SIGINT)
            said = child.stderr.read()
        with Volume.open([uri]) as volume:
            whole = "a.json" in volume
        # It may come behind the commit, and when Python hears no signals any more.
        good = (0, 130, -signal.SIGINT) if whole else (130,)
        assert child.returncode in good, (child.returncode, said)
        assert "Traceback" not in said, said
        assert not psutil.wait_procs(workers, timeout=60)[1]
        if whole:
            check([uri], expected)
            return number
        nothing_half([uri])
    raise AssertionError("it was not done, though nobody interrupted it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "texts")
        tokenizer = folder / "tokenizer.json"
        with Volume.create("mem:64MiB") as volume, volume.session(run_id="test") as session:
            ingest(corpus, session, "t", IngestOptions(vocab_size=300, workers=1))
            tokenizer.write_bytes(volume.read("t.tokenizer.json"))
            ingest(corpus, session, "a", IngestOptions(tokenizer=tokenizer, workers=1))
            expected = objects(volume, "a")
        heard = 0
        for number in range(options.rounds):
            over_a_bad_fabric(corpus, tokenizer, expected, options.seed + number)
            print(f"fabric, seed {options.seed + number}: good", flush=True)
        while heard < options.rounds:
            uri = f"file:{folder}/{heard}.img"
            Volume.create([f"{uri}?create=64MiB"]).close()
            heard += interrupted(uri, corpus, tokenizer, expected, options.rounds, options.seed + heard) or 1
            print(f"Ctrl-C, {heard} times: good", flush=True)


if __name__ == "__main__":
    main()
