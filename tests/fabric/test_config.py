"""The configuration file: what it says, what is wrong with it, and that options and file say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.fabric import FileMedia, HostOptions, MemoryMedia, Target, TargetOptions
from headrace.fabric.config import load_config, to_toml

WHOLE = """
io_engine = "pread"
memory = "128MiB"
connection_memory = "8MiB"
max_h2c_data = "256KiB"
mdts = "256KiB"
in_capsule = "4KiB"
max_connections = 64
max_host_connections = 32
max_queue_entries = 128
max_io_queues = 4
connect_timeout_s = 2.5
progress_timeout_s = 20
reactor_threads = 1
worker_threads = 2

[[listen]]
name = "a"
address = "127.0.0.1:0"

[[listen]]
name = "b"
address = "[::1]:0"

[[discovery.listen]]
address = "127.0.0.1:0"
name = "directory"

[[subsystem]]
nqn = "nqn.2026-01.io.example:one"
serial = "S 1"
model = "Channel"
other_hosts = "read-only"
mdts = "64KiB"
in_capsule = 0
max_queue_entries = 32
max_io_queues = 2
host = ["nqn.2026-01.io.example:all"]

[[subsystem.ana_group]]
id = 1
states = { b = "non-optimized" }

[[subsystem.ana_group]]
id = 3
state = "inaccessible"

[[subsystem.namespace]]
path = "disk"
size = "64MiB"
create = true
direct = "off"
block_size = 512
volatile_cache = "1MiB"
uuid = "00112233-4455-6677-8899-aabbccddeeff"
nguid = "00112233445566778899aabbccddeeff"
reservations = "disk.r"

[[subsystem.namespace]]
nsid = 7
memory = "1MiB"
no_reservations = true
ana_group = 3

[[subsystem]]
nqn = "nqn.2026-01.io.example:two"

[[subsystem.host]]
nqn = "nqn.2026-01.io.example:reader"
access = "read-only"
"""

SMALL = """
listen = ["127.0.0.1:0"]

[[subsystem]]
nqn = "nqn.2026-01.io.example:one"

[[subsystem.namespace]]
memory = "1MiB"
"""


def load(tmp_path: Path, text: str) -> TargetOptions:
    file = tmp_path / "target.toml"
    file.write_text(text)
    return load_config(str(file))


def test_everything_a_file_can_say(tmp_path: Path) -> None:
    options = load(tmp_path, WHOLE)
    assert [(at.host, at.port, at.name, at.discovery) for at in options.listen] == [
        ("127.0.0.1", 0, "a", False),
        ("::1", 0, "b", False),
        ("127.0.0.1", 0, "directory", True),
    ]
    assert (options.memory_bytes, options.connection_memory_bytes) == (128 << 20, 8 << 20)
    assert (options.connect_timeout_ms, options.progress_timeout_ms) == (2500, 20000)
    one, two = options.subsystems
    assert (one.serial, one.model, one.other_hosts, one.mdts_bytes) == ("S 1", "Channel", "read-only", 65536)
    assert list(one.allow_hosts) == [HostOptions(nqn="nqn.2026-01.io.example:all")]
    assert [(group.id, group.state, dict(group.states)) for group in one.ana_groups] == [
        (1, "optimized", {"b": "non-optimized"}),
        (3, "inaccessible", {}),
    ]
    disk, memory = one.namespaces
    assert disk.media == FileMedia(path=f"{tmp_path}/disk", size_bytes=64 << 20, create=True, direct="off")
    assert disk.reservations_path == f"{tmp_path}/disk.r"
    assert (disk.nsid, disk.block_bytes, disk.volatile_cache_bytes) == (1, 512, 1 << 20)
    assert (memory.nsid, memory.media, memory.ana_group) == (7, MemoryMedia(size_bytes=1 << 20), 3)
    assert (disk.no_reservations, memory.no_reservations) == (False, True)
    assert list(two.allow_hosts) == [HostOptions(nqn="nqn.2026-01.io.example:reader", access="read-only")]
    # The other way, and back.
    assert load(tmp_path, to_toml(options)).to_json() == options.to_json()


def test_the_target_takes_it(tmp_path: Path) -> None:
    (tmp_path / "disk.r").touch()
    with Target(load(tmp_path, WHOLE.replace("[::1]:0", "127.0.0.1:0"))) as target:
        status = target.status()
    assert [portal["name"] for portal in status["portals"]] == ["a", "b", "directory"]
    one = status["subsystems"][0]
    assert one["namespaces"][0]["uuid"] == "00112233445566778899aabbccddeeff"
    assert one["ana_groups"][0]["states"] == {"a": "optimized", "b": "non-optimized"}
    assert (one["hosts"], one["other_hosts"]) == ({"nqn.2026-01.io.example:all": "read-write"}, "read-only")
    assert (tmp_path / "disk").stat().st_size == 64 << 20


@pytest.mark.parametrize(
    ("find", "replace", "says"),
    [
        ('"nqn.2026-01.io.example:one"', '"one"', ["subsystem[0].nqn", "an NVMe name", "'one'"]),
        ('"nqn.2026-01.io.example:one"', '"nqn.2014-08.org.nvmexpress.discovery"', ["subsystem[0].nqn", "discovery"]),
        ('memory = "1MiB"', 'memory = "1 apple"', ["subsystem[0].namespace[0].memory", "64GiB", "1 apple"]),
        ('memory = "1MiB"', "memory = 1000", ["namespace[0].memory", "multiple of 4096", "1000"]),
        ('memory = "1MiB"', "memory = true", ["namespace[0].memory", "a size"]),
        ('memory = "1MiB"', "", ["namespace[0].path", "neither"]),
        ('memory = "1MiB"', 'memory = "1MiB"\npath = "x"', ["namespace[0].path", "both"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nreservations = "r"', ["namespace[0].reservations", "only with a path"]),
        (
            'memory = "1MiB"',
            'path = "x"\nsize = "1MiB"\ncreate = true\nreservations = "r"\nno_reservations = true',
            ["namespace[0].reservations", "no_reservations"],
        ),
        ('memory = "1MiB"', 'memory = "1MiB"\ncreate = true', ["namespace[0].create", "only with a path"]),
        ('memory = "1MiB"', 'memory = "1MiB"\ndirect = "on"', ["namespace[0].direct", "only with a path"]),
        ('memory = "1MiB"', 'path = "x"\ndirect = "maybe"', ["namespace[0].direct", "maybe"]),
        ('memory = "1MiB"', 'path = "nothing"', ["namespace[0].path", "nothing", "create = true"]),
        ('memory = "1MiB"', 'path = "x"\ncreate = true', ["namespace[0].size", "none"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nblock_size = 1024', ["namespace[0].block_size", "512 or 4096", "1024"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nnsid = 0', ["namespace[0].nsid", "1 to 4096", "0"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nuuid = "12"', ["namespace[0].uuid", "32 hexadecimal"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nana_group = 2', ["namespace[0].ana_group", "groups, 1", "2"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nread_only = 1', ["namespace[0].read_only", "true or false"]),
        ('memory = "1MiB"', 'memory = "1MiB"\nvolatile = 1', ["namespace[0].volatile", "did you mean volatile_cache"]),
        (
            'memory = "1MiB"',
            'memory = "1MiB"\n[[subsystem.namespace]]\nmemory = "1MiB"\nnsid = 1',
            ["subsystem[0].namespace[1].nsid", "once"],
        ),
        (
            'memory = "1MiB"',
            'path = "t"\nsize = "1MiB"\ncreate = true\n'
            '[[subsystem.namespace]]\npath = "./t"\nsize = "1MiB"\ncreate = true',
            ["subsystem[0].namespace[1].path", "of its own", "subsystem[0].namespace[0]"],
        ),
        ("127.0.0.1:0", "127.0.0.1:99999", ["listen[0].address", "HOST:PORT", "99999"]),
        ('"127.0.0.1:0"', "7", ["listen", "a list of texts or tables"]),
        ("127.0.0.1:0", "0.0.0.0:0", ["subsystem[0].host", "0.0.0.0", "other_hosts"]),
        ('listen = ["127.0.0.1:0"]', "mdts = 9000", ["mdts", "power of two"]),
        ('listen = ["127.0.0.1:0"]', 'in_capsule = "8MiB"', ["in_capsule", "65536"]),
        ('listen = ["127.0.0.1:0"]', 'io_engine = "fast"', ["io_engine", "auto or io_uring or pread"]),
        ('listen = ["127.0.0.1:0"]', "worker_threads = 0", ["worker_threads", "1 to 64"]),
        ('listen = ["127.0.0.1:0"]', "connect_timeout_s = 0", ["connect_timeout_s", "0.01"]),
        (
            'listen = ["127.0.0.1:0"]',
            'listen = [{address = "127.0.0.1:0", name = "a"}, {address = "127.0.0.1:0", name = "a"}]',
            ["listen", "a name of its own", "'a'"],
        ),
        ('listen = ["127.0.0.1:0"]', "listen = [", ["not TOML", "line"]),
        ("[[subsystem.namespace]]", 'serial = "more than twenty bytes"\n[[subsystem.namespace]]', ["[0].serial", "20"]),
        ("[[subsystem.namespace]]", 'model = "a\\tb"\n[[subsystem.namespace]]', ["[0].model", "printable"]),
        ("[[subsystem.namespace]]", 'host = ["me"]\n[[subsystem.namespace]]', ["subsystem[0].host[0].nqn", "'me'"]),
        (
            "[[subsystem.namespace]]",
            'host = ["nqn.a", "nqn.a"]\n[[subsystem.namespace]]',
            ["subsystem[0].host[1].nqn", "once"],
        ),
        (
            "[[subsystem.namespace]]",
            '[[subsystem.host]]\nnqn = "nqn.a"\naccess = "all"\n[[subsystem.namespace]]',
            ["subsystem[0].host[0].access", "read-write or read-only", "'all'"],
        ),
        (
            "[[subsystem.namespace]]",
            'other_hosts = "all"\n[[subsystem.namespace]]',
            ["subsystem[0].other_hosts", "'all'"],
        ),
        (
            "[[subsystem.namespace]]",
            '[[subsystem.ana_group]]\nid = 1\nstates = {c = "optimized"}\n[[subsystem.namespace]]',
            ["subsystem[0].ana_group[0].states.c", "portal", "1"],
        ),
        (
            "[[subsystem.namespace]]",
            '[[subsystem.ana_group]]\nid = 1\nstate = "fast"\n[[subsystem.namespace]]',
            ["subsystem[0].ana_group[0].state", "optimized or", "'fast'"],
        ),
        ("[[subsystem.namespace]]", "[[subsystem.ana_group]]\n[[subsystem.namespace]]", ["ana_group[0].id", "nothing"]),
        ("[[subsystem]]", "[subsystem]", ["subsystem", "list of tables", "a table"]),
    ],
)
def test_each_mistake_is_one_sentence(tmp_path: Path, find: str, replace: str, says: list[str]) -> None:
    assert find in SMALL
    with pytest.raises(UsageError) as caught:
        load(tmp_path, SMALL.replace(find, replace, 1))
    said = str(caught.value)
    assert all(part in said for part in says), said
    assert "\n" not in said
    assert "target.toml" in said


def test_what_is_no_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"#" * (2 << 20))
    (tmp_path / "latin").write_bytes(b'a = "\n\xe9"')
    for name, says in (("none", "No such file"), ("", "Is a directory"), ("long", "at most"), ("latin", "line 2")):
        with pytest.raises(UsageError, match=says):
            load_config(str(tmp_path / name))
    with pytest.raises(UsageError, match="at least one"):
        load(tmp_path, "")


@pytest.mark.parametrize(
    "line",
    [
        "x = " + "[" * 20000,
        "x = " + "[" * 3000 + "]" * 3000,
        "x = " + "{a=" * 3000 + "1" + "}" * 3000,
        "x = " + "9" * 5000,
    ],
)
def test_what_the_reader_of_toml_stumbles_over(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="not TOML"):
        load(tmp_path, line)


@pytest.mark.parametrize("name", ["a" * 3000, "loop"])
def test_a_path_that_cannot_be_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    text = SMALL.replace('memory = "1MiB"', f'path = "{name}"')
    assert text != SMALL
    with pytest.raises(UsageError, match=r"namespace\[0\]\.path"):
        load(tmp_path, text)
    # Whoever opens it says what is wrong with it.
    with pytest.raises(HeadraceError, match=name[:4]), Target(load(tmp_path, text + '\nsize = "1MiB"\ncreate = true')):
        pass


def test_a_subsystem_may_be_given_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"subsystem\[1\]\.nqn"):
        load(tmp_path, SMALL + '\n[[subsystem]]\nnqn = "nqn.2026-01.io.example:one"\n')


def test_texts_survive(tmp_path: Path) -> None:
    name = 'a "quoted" \\ path with é'
    options = load(tmp_path, SMALL.replace('memory = "1MiB"', f"path = {json.dumps(name)}\nsize = 4096\ncreate = true"))
    assert load(tmp_path, to_toml(options)).to_json() == options.to_json()
    media = options.subsystems[0].namespaces[0].media
    assert isinstance(media, FileMedia)
    assert media.path == f"{tmp_path}/{name}"
