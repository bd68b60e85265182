"""A meeting over TCP: rank 0 listens on a port of its node, the others come to it.

    rank r                          rank 0
    {"hello": token, "rank", ...} ->
                                  <- {"welcome": host}
    {"time": n}                   ->
                                  <- {"time": n, "now": its clock}          a few times: whose clock differs by how much
    {"ready": true}               ->
                                  <- {"all": hosts}                         when everybody is ready
    {"round": k, "value": ...}    ->
                                  <- {"round": k, "answer": ...}            when everybody has brought one
    {"beat": still, "sent": time} <->                                       every two seconds from then on (`beats`)
    {"leave": reason}             ->     a rank that failed
                                  <- {"failed": text}                       and the meeting is over, at any time

Whoever connects and says no hello of this run, in time and within the bound, is sent away and changes nothing else.
The port is let go when all are there.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.bench.meeting import beats
from headrace.bench.meeting.beats import Beats, Heard
from headrace.bench.meeting.messages import ALL_BYTES, RESULT_BYTES, Garbage, Inbox, encode
from headrace.bench.meeting.seat import Seat
from headrace.bench.meeting.together import GRACE_S, Meeting, Value, printable, reason
from headrace.errors import HeadraceError, MeetingFailed, UsageError

#: How long somebody who connected may take to say who it is, and how many may be at it at once.
_HELLO_S = 10.0
_STRANGERS = 64
#: Questions for the time: the one that was answered soonest counts (Cristian, "Probabilistic clock synchronization",
#: Distributed Computing 3, 1989).
_QUESTIONS = 8
_PIECE = 1 << 18
#: All ranks may come at one moment, and others with them; one that finds no room tries again after a second.
_BACKLOG = 512
_RETRY_S = 0.1
_RETRY_MOST_S = 1.0
#: Who waits for others looks so often whether they are heard of.
_SLICE_S = 1.0


class _Peer:
    """A connection at rank 0. `rank`: None until it has said hello."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self.connection = connection
        self.where = where
        self.rank: int | None = None
        self.host = ""
        self.ready = False
        self.inbox = Inbox()
        self.since_s = time.monotonic()
        self.values: dict[int, Value] = {}
        self.heard = Heard()
        #: Of a beat, what found no room: it goes before all else.
        self.rest = b""


class TcpMeeting(Meeting):
    def __init__(self, seat: Seat, port: int) -> None:
        super().__init__(seat)
        if not 1 <= port <= 65535:
            raise UsageError("--meet-port", expected="1 to 65535", found=str(port))
        if not seat.address:
            raise UsageError(
                "nobody says where rank 0 is", expected="MASTER_ADDR, as torchrun sets it",
                next_step="set it, or meet in a folder that all nodes see: --meet FOLDER",
            )  # fmt: skip
        self._port = port
        self._round = 0
        self._over = False
        #: Of rank 0: who has come, and what odd ones said, for the message when somebody is missing.
        self._peers: list[_Peer] = []
        self._odd = ""
        self.strangers = 0
        #: Of the others: the way to rank 0.
        self._socket: socket.socket | None = None
        self._inbox = Inbox(RESULT_BYTES)
        self._heard = Heard()
        self._rest = b""
        self._beats: Beats | None = None
        #: Held by whoever sends: beats come from a thread of their own.
        self._sending = threading.Lock()

    # ---- what all do ----

    def join(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        if self.seat.rank == 0:
            self._gather_all(deadline_s, within_s)
        else:
            self._come(deadline_s, within_s)
        self._beats = Beats(self._beat)

    def gather(self, value: Value, answer: Callable[[list[Value]], Value], *, within_s: float) -> Value:
        self._round += 1
        deadline_s = time.monotonic() + within_s
        try:
            message = encode({"round": self._round, "value": value}, self._most_bytes())
        except Garbage as error:
            raise MeetingFailed(f"what {self.seat.named()} found is too much to send: {error}") from None
        if self.seat.rank == 0:
            values = self._collect(value, deadline_s, within_s)
            found = answer(values)
            try:
                self._tell({"round": self._round, "answer": found})
            except Garbage as error:
                raise MeetingFailed(f"what all ranks found is too much to send: {error}") from None
            return found
        self._send(message, deadline_s)
        said = self._hear(deadline_s + GRACE_S, within_s)
        if said.get("round") != self._round or "answer" not in said:
            raise MeetingFailed("rank 0 answered something else than it was asked", where=self._where())
        return said["answer"]

    def leave(self, error: BaseException | None = None) -> None:
        if self._over:
            return
        self._over = True
        if self._beats is not None:
            self._beats.stop()
        if error is not None:
            if self.seat.rank == 0:
                text = str(error) if isinstance(error, MeetingFailed) else f"rank 0 failed: {reason(error)}"
                self._tell({"failed": text})
            elif self._socket is not None and not isinstance(error, MeetingFailed):
                with contextlib.suppress(OSError, MeetingFailed):
                    self._send(encode({"leave": reason(error)}), time.monotonic() + GRACE_S)
        for peer in self._peers:
            peer.connection.close()
        if self._socket is not None:
            self._socket.close()

    def _most_bytes(self) -> int:
        return min(RESULT_BYTES, ALL_BYTES // self.seat.world)

    def _where(self) -> str:
        return f"{self.seat.address}:{self._port}"

    def _beat(self, still_s: float) -> None:
        """On the thread of beats. What finds no room is left out: who does not listen now needs none."""
        data = encode(beats.message(still_s, self.clock_s))
        if not self._sending.acquire(blocking=False):
            return
        try:
            if self._socket is not None:
                self._rest = _some(self._socket, self._rest, data)
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.rest = _some(peer.connection, peer.rest, data)
        finally:
            self._sending.release()

    # ---- rank 0 ----

    def _gather_all(self, deadline_s: float, within_s: float) -> None:
        listeners = _listen(self.seat.address, self._port)
        try:
            with selectors.DefaultSelector() as waiting:
                for listener in listeners:
                    waiting.register(listener, selectors.EVENT_READ)
                while not self._complete():
                    if time.monotonic() >= deadline_s:
                        raise self._missing(within_s)
                    for key, _ in waiting.select(min(1.0, max(0.0, deadline_s - time.monotonic()))):
                        if key.data is None:
                            self._accept(key.fileobj, waiting)
                        else:
                            self._listen_to(key.data, waiting)
                    self._send_away_late(waiting)
        finally:
            for listener in listeners:
                listener.close()
            for stranger in [peer for peer in self._peers if peer.rank is None]:
                self._drop(stranger, None)
        self._peers.sort(key=lambda peer: peer.rank or 0)
        self.hosts = [self.seat.host, *(peer.host for peer in self._peers)]
        self._tell({"all": self.hosts})

    def _complete(self) -> bool:
        return sum(peer.ready for peer in self._peers) == self.seat.world - 1

    def _missing(self, within_s: float) -> MeetingFailed:
        here = {peer.rank for peer in self._peers if peer.ready}
        away = [rank for rank in range(1, self.seat.world) if rank not in here]
        others = f"; {self._odd}" if self._odd else ""
        return MeetingFailed(
            f"{self.names(away)} of {self.seat.world} did not come within {within_s:g} s", where=self._where(),
            next_step=f"start every rank, and see that their nodes reach that port (--meet-port){others}",
        )  # fmt: skip

    def _accept(self, listener: Any, waiting: selectors.BaseSelector) -> None:
        try:
            connection, address = listener.accept()
        except OSError:
            return
        strangers = [peer for peer in self._peers if peer.rank is None]
        if len(strangers) >= _STRANGERS + self.seat.world:
            self._drop(strangers[0], waiting)
        connection.setblocking(False)
        _keep_alive(connection)
        peer = _Peer(connection, str(address[0]))
        self._peers.append(peer)
        waiting.register(connection, selectors.EVENT_READ, peer)

    def _listen_to(self, peer: _Peer, waiting: selectors.BaseSelector) -> None:
        """What a peer has to say while ranks come. Whoever says odd things goes; a rank that goes may come again."""
        try:
            if not _receive(peer):
                self._drop(peer, waiting)
                return
            while (message := peer.inbox.next()) is not None:
                if peer.rank is None:
                    self._greet(peer, message)
                elif "time" in message:
                    _reply(peer, {"time": message["time"], "now": time.monotonic()})
                elif "ready" in message:
                    peer.ready = True
                elif "leave" in message:
                    text = f"{self._name(peer)} failed: {printable(message['leave'])}"
                    self._drop(peer, waiting)
                    raise MeetingFailed(text)
                else:
                    raise Garbage("none of a rank that comes")
        except (Garbage, OSError) as error:
            if peer.rank is not None:
                self._odd = f"{self._name(peer)} was sent away: {error}"
            self._drop(peer, waiting)

    def _greet(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank, world = message.get("rank"), message.get("world")
        if not isinstance(rank, int) or isinstance(rank, bool) or not isinstance(message.get("hello"), str):
            raise Garbage("no hello")
        if message["hello"] != self.seat.token:
            self._odd = f"rank {printable(rank, 9)} of {printable(world, 9)} of another run came from {peer.where}"
            _reply(peer, {"failed": f"rank 0 at {self._where()} belongs to another run, of {self.seat.world} ranks"})
            raise Garbage("a rank of another run")
        if not 0 < rank < self.seat.world or any(other.rank == rank for other in self._peers):
            self._odd = f"rank {printable(rank, 9)} came twice"
            _reply(peer, {"failed": f"rank 0 has a rank {printable(rank, 9)} already, or its world is smaller"})
            raise Garbage("a rank that is there already")
        peer.rank, peer.host = rank, printable(message.get("host", ""), 80)
        peer.inbox.most_bytes = self._most_bytes()
        _reply(peer, {"welcome": self.seat.host})

    def _send_away_late(self, waiting: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        for peer in [p for p in self._peers if p.rank is None and now_s - p.since_s > _HELLO_S]:
            self._drop(peer, waiting)

    def _drop(self, peer: _Peer, waiting: selectors.BaseSelector | None) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self.strangers += peer.rank is None
        if waiting is not None:
            waiting.unregister(peer.connection)
        peer.connection.close()

    def _collect(self, own: Value, deadline_s: float, within_s: float) -> list[Value]:
        with selectors.DefaultSelector() as waiting:
            for peer in self._peers:
                waiting.register(peer.connection, selectors.EVENT_READ, peer)
                peer.heard.wait_from_now()
                self._take(peer)  # What came with the last round's already.
            while away := [peer for peer in self._peers if self._round not in peer.values]:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    names = self.names([peer.rank or 0 for peer in away])
                    raise MeetingFailed(f"{names} brought nothing within {within_s:g} s")
                for peer in away:
                    peer.heard.check(self._name(peer), self.silent_s)
                for key, _ in waiting.select(min(left_s, _SLICE_S)):
                    peer = key.data
                    try:
                        if not _receive(peer):
                            raise MeetingFailed(f"{self._name(peer)} died or was stopped before it was done")
                    except OSError as error:
                        raise MeetingFailed(f"{self._name(peer)} was lost: {error.strerror or error}") from None
                    except Garbage as error:
                        raise self._unreadable(peer, error) from None
                    self._take(peer)
        return [own, *(peer.values.pop(self._round) for peer in self._peers)]

    def _take(self, peer: _Peer) -> None:
        try:
            while (message := peer.inbox.next()) is not None:
                if "leave" in message:
                    raise MeetingFailed(f"{self._name(peer)} failed: {printable(message['leave'])}")
                if "beat" in message:
                    peer.heard.beat(message, 0.0)
                    continue
                if message.get("round") != self._round or "value" not in message:
                    raise Garbage("not what was asked for")
                peer.values[self._round] = message["value"]
        except Garbage as error:
            raise self._unreadable(peer, error) from None

    def _unreadable(self, peer: _Peer, error: Garbage) -> MeetingFailed:
        return MeetingFailed(f"{self._name(peer)} sent what cannot be read: {error}")

    def _tell(self, message: dict[str, Any]) -> None:
        """All at once, as far as that goes; who does not take it is noticed the next time that it is listened to."""
        data = encode(message)
        with self._sending:
            for peer in self._peers:
                if peer.rank is not None:
                    with contextlib.suppress(OSError):
                        peer.connection.settimeout(GRACE_S)
                        peer.connection.sendall(peer.rest + data)
                        peer.rest = b""
                    with contextlib.suppress(OSError):
                        peer.connection.setblocking(False)

    def _name(self, peer: _Peer) -> str:
        return f"rank {peer.rank}" + (f" ({peer.host})" if peer.host else "")

    # ---- the other ranks ----

    def _come(self, deadline_s: float, within_s: float) -> None:
        seat = self.seat
        hello = {"hello": seat.token, "rank": seat.rank, "world": seat.world, "host": seat.host}
        pause_s, why = _RETRY_S, ""
        while self._socket is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise MeetingFailed(
                    f"rank 0 was not there within {within_s:g} s", where=self._where(), found=why or None,
                    next_step="start every rank, and see that this node reaches that port (--meet-port)",
                )  # fmt: skip
            try:
                self._socket = socket.create_connection((seat.address, self._port), min(5.0, left_s))
            except OSError as error:
                why = error.strerror or str(error)
                time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
                pause_s = min(2 * pause_s, _RETRY_MOST_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(self._socket)
        self._send(encode(hello), deadline_s)
        self._expect("welcome", deadline_s + GRACE_S, within_s)
        self._compare_clocks(deadline_s, within_s)
        self._send(encode({"ready": True}), deadline_s)
        hosts = self._expect("all", deadline_s + GRACE_S, within_s)
        self.hosts = [printable(host, 80) for host in hosts] if isinstance(hosts, list) else []

    def _compare_clocks(self, deadline_s: float, within_s: float) -> None:
        best_s = float("inf")
        for number in range(_QUESTIONS):
            asked_s = time.monotonic()
            self._send(encode({"time": number}), deadline_s)
            said = self._hear(deadline_s + GRACE_S, within_s)
            took_s = time.monotonic() - asked_s
            if said.get("time") != number or not isinstance(said.get("now"), int | float):
                raise MeetingFailed("rank 0 does not tell the time", where=self._where())
            if took_s < best_s:
                best_s = took_s
                self.clock_s = float(said["now"]) - (asked_s + took_s / 2)
        self.clock_error_s = best_s / 2

    def _expect(self, name: str, deadline_s: float, within_s: float) -> Any:
        said = self._hear(deadline_s, within_s)
        if name not in said:
            raise MeetingFailed("who answers is not rank 0 of this run", where=self._where())
        return said[name]

    def _send(self, data: bytes, deadline_s: float) -> None:
        assert self._socket is not None
        try:
            with self._sending:
                self._socket.settimeout(max(0.01, deadline_s - time.monotonic()))
                self._socket.sendall(self._rest + data)
                self._rest = b""
        except OSError as error:
            # It may have said why before it went.
            with contextlib.suppress(OSError):
                self._hear(time.monotonic() + 0.5, 0.5)
            raise self._lost(error) from None

    def _hear(self, deadline_s: float, within_s: float) -> dict[str, Any]:
        assert self._socket is not None
        try:
            self._heard.wait_from_now()
            while (message := self._inbox.next()) is None or "beat" in message:
                if message is not None:
                    self._heard.beat(message, self.clock_s)
                    continue
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise MeetingFailed(f"rank 0 said nothing within {within_s:g} s", where=self._where())
                if self._beats is not None:
                    self._heard.check(self.names([0]), self.silent_s)
                self._socket.settimeout(min(left_s, _SLICE_S))
                try:
                    data = self._socket.recv(_PIECE)
                except TimeoutError:
                    continue
                if not data:
                    raise MeetingFailed("rank 0 died or was stopped before it was done", where=self._where())
                self._inbox.feed(data)
        except Garbage as error:
            raise MeetingFailed("who answers is not rank 0", where=self._where(), found=str(error)) from None
        except OSError as error:
            raise self._lost(error) from None
        if "failed" in message:
            raise MeetingFailed(printable(message["failed"], 1000))
        return message

    def _lost(self, error: OSError) -> MeetingFailed:
        return MeetingFailed("rank 0 was lost", where=self._where(), found=error.strerror or str(error))


def _listen(address: str, port: int) -> list[socket.socket]:
    """On the address that the others were told. On all of this node's where that is none of them (a translated one), or
    where a node's name is this node's loopback here: many have it so in /etc/hosts, and others mean another address."""
    places: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        places = list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))
    if address != "localhost" and any(where != address and _is_loopback(where) for _, where in places):
        places = []
    listeners: list[socket.socket] = []
    for family, where in [*places, (socket.AF_INET, "")]:
        if listeners and where == "":
            break
        try:
            listener = socket.create_server((where, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for each in listeners:
                    each.close()
                raise UsageError(
                    f"port {port} of rank 0's node is in use", where=address,
                    next_step="choose another one on every rank: --meet-port",
                ) from None  # fmt: skip
            continue
        listener.setblocking(False)
        listeners.append(listener)
    if not listeners:
        raise HeadraceError("rank 0 cannot listen", where=f"{address}:{port}")
    return listeners


def _is_loopback(where: str) -> bool:
    return where == "::1" or where.startswith("127.")


def _receive(peer: _Peer) -> bool:
    """Some of what has come; False: the connection has ended."""
    try:
        data = peer.connection.recv(_PIECE)
    except BlockingIOError:
        return True
    if data:
        peer.inbox.feed(data)
    return bool(data)


def _reply(peer: _Peer, message: dict[str, Any]) -> None:
    # Small, and each is an answer to something: where the buffer is full of them, somebody floods.
    try:
        peer.connection.sendall(encode(message))
    except BlockingIOError:
        raise Garbage("it does not read what it is told") from None


def _some(connection: socket.socket, rest: bytes, data: bytes) -> bytes:
    """Send what was left of a message, or else `data`, as far as there is room; gives what is left of it then."""
    try:
        sent = connection.send(rest or data)
    except (BlockingIOError, TimeoutError):
        return rest
    return (rest or data)[sent:]


def _keep_alive(connection: socket.socket) -> None:
    """A node that fell silent is noticed within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
