"""How the ranks of one save or load talk: rounds over a key-value store, with deadlines and with names.

A round is `gather to the coordinator, decide, scatter`, as in DCP; but where a collective that met its time-out leaves
the group unusable and does not say who was missing, a round

* says which rank did not answer, and for how long it gave no sign of life,
* carries a rank's error to all others as text, and
* leaves nothing behind that could disturb the next save.

Theory. The messages of a save live under a token that the coordinator draws afresh and publishes under the key
`current` before DCP hands out the plans (never *in* a plan: DCP may cache plans), and that every rank reads when its
part begins. While a rank works on a save, a thread of it beats a key. Whoever waits for a rank watches that beat on its
*own* clock: no change for `stall_s` means dead or stopped, `deadline_s` in all means too slow. The store is the one
with which the job rendezvoused; each thread uses a client of its own, so that no wait here blocks anything else.

Nothing comes before a load that could order its ranks. So they meet (`meeting`): each leaves a word of its own, and the
coordinator answers each word that it finds with the token. A word that was left for a load which the coordinator gave
up is answered by the next one; who gives up takes its word back.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch.distributed as dist

from headrace import errors
from headrace.errors import CheckpointFailed, HeadraceError
from headrace.torch.ranks.aside import StoreClient
from headrace.torch.ranks.beats import BEATS, Beats, Pulse, Watch
from headrace.units import format_seconds

#: Longest message of one rank, grants and receipts included.
MESSAGE_LIMIT = 64 << 20
#: What the store may be asked by all waiting ranks of a job.
STORE_QUESTIONS_PER_S = 5000
#: Beyond what the store itself waits for a key (`stall_s`).
ANSWER_S = 5.0
_AFTER = {
    "save": "the checkpoints before it are untouched",
    "load": "what was loaded so far is not to be used",
    "meeting": "all ranks must come here, and may try again",
}
_LIMITS = {"save": "deadline_s", "load": "timeout_s", "meeting": "deadline_s"}
_FIELDS = ("what", "where", "expected", "found", "next_step")

_NAMED = re.compile(r"rank [0-9]+: ")

Decide = Callable[[list[bytes]], Sequence[bytes]]
#: The messages of those ranks that did not fail, where others did.
Heard = Callable[[list[bytes]], None]


class PeerFailed(CheckpointFailed):
    """A rank did not get from another one what that owed it."""


class Exchange(Protocol):
    """The ranks of a save, seen from one of them."""

    rank: int
    world: int

    def announce(self) -> None:
        """Coordinator: a new save begins. Before any rank calls `save`."""

    def save(self) -> contextlib.AbstractContextManager[None]:
        """This rank's part of the save that was announced last; rounds happen inside. The rank beats meanwhile."""

    def meeting(self) -> contextlib.AbstractContextManager[None]:
        """Instead of `announce` and `save`, where nothing has brought the ranks together: waits for all of them."""

    def round(self, stage: str, mine: bytes | Exception, decide: Decide, heard: Heard | None = None) -> bytes:
        """Give the coordinator `mine`, get back its decision for this rank.

        `decide` runs on the coordinator with the messages of all ranks in order and returns one answer a rank. An
        exception given as `mine`, one raised by `decide`, or the silence of a rank raises on every rank that lives:
        CheckpointFailed, or on the rank that it befell the exception itself. `heard` runs on the coordinator instead of
        `decide` where every rank answered, and some with an exception.
        """


class SoloExchange:
    """The exchange of a job that is one process."""

    rank = 0
    world = 1

    def announce(self) -> None:
        return None

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        yield

    meeting = save

    def round(self, stage: str, mine: bytes | Exception, decide: Decide, heard: Heard | None = None) -> bytes:
        if isinstance(mine, Exception):
            raise mine
        return decide([mine])[0]


class StoreExchange:
    """See the module text.

    Args:
        store: any torch.distributed store that all ranks reach; used through clones.
        prefix: of all keys; equal on all ranks and unlike that of any other exchange on this store.
        stall_s: a rank that gives no sign of life for so long is taken for dead.
        deadline_s: the longest that one round may take.
        doing: for the texts.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        *,
        stall_s: float,
        deadline_s: float,
        doing: Literal["save", "load", "meeting"] = "save",
    ) -> None:
        self.doing = doing
        self.rank = rank
        self.world = world
        self._origin = store
        self._prefix = prefix
        self._stall_s = stall_s
        self._store = self._client()
        #: Of the thread that beats while a save or load is under way, made by the first.
        self._beating: StoreClient | None = None
        self._deadline_s = deadline_s
        self._token: str | None = None
        self._spent: str | None = None
        #: In this meeting somebody may have left a word for those that watch.
        self._watched = False

    def _client(self) -> StoreClient:
        """One more, for one thread. Whoever has the store is a rank, or its neighbour, and lives or not as one does."""
        with self._store_errors(f"joining a {self.doing}"):
            return StoreClient(self._prefix, self._origin, self._stall_s + ANSWER_S)

    def _part(self) -> Pulse:
        """While this rank does its part: one at a time, so one client is enough."""
        self._beating = self._beating or self._client()
        return Pulse(self._beating, self.rank, self._stall_s)

    @property
    def token(self) -> str:
        """Of the save or load that is under way: one for all its ranks, and of no other."""
        if self._token is None:
            raise CheckpointFailed("no save or load is under way")
        return self._token

    def announce(self) -> None:
        # Keys of the save before the last can go: every rank that lives has moved on since.
        if self._spent is not None:
            for stage in ("grant", "receipt"):
                for rank in range(self.world):
                    with contextlib.suppress(RuntimeError):
                        self._store.delete_key(f"{self._spent}/{stage}/{rank}")
                        self._store.delete_key(f"{self._spent}/{stage}/reply/{rank}")
        with self._store_errors("announcing a save"):
            before = self._store.get("current").decode() if self._store.check(["current"]) else None
            self._spent = before
            self._store.set("current", uuid.uuid4().hex)

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        with self._store_errors("joining a save"):
            self._store.set_timeout(timedelta(seconds=self._stall_s))
            self._token = self._store.get("current").decode()
        with self._part():
            try:
                yield
            finally:
                self._token = None

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Instead of `announce` and `save`: this rank's part of what its ranks begin together. Waits for all of them,
        for `deadline_s` at most; rounds happen inside, and each rank beats meanwhile."""
        with self._store_errors("meeting"):
            self._store.set_timeout(timedelta(seconds=self._stall_s))
        with self._part():
            self._token = self._meet()
            try:
                yield
            finally:
                if self._watched and self.rank == 0:
                    # Every rank that lives has left its exchange, and looks no more.
                    self._forget(f"{self._token}/word")
                self._token, self._watched = None, False

    def _meet(self) -> str:
        word = uuid.uuid4().hex
        if self.rank:
            with self._store_errors("meeting"):
                self._store.set(f"here/{self.rank}", word)
            try:
                [answer] = self._collect([0], lambda _: f"welcome/{word}", "beginning", patient=True)
            except BaseException:
                # Nobody waits for its answer any more: who comes late must not begin with it.
                self._forget(f"here/{self.rank}")
                raise
            self._forget(f"welcome/{word}")
            return self._decode(answer).decode()
        others = range(1, self.world)
        try:
            words = self._collect(others, lambda rank: f"here/{rank}", "beginning", patient=True)
        except CheckpointFailed as error:
            for rank in others:
                # Where the store is gone, this rank has its own error to tell.
                with contextlib.suppress(CheckpointFailed):
                    left = self._word(f"here/{rank}")
                    if left is not None:
                        self._welcome(rank, left, _encode(error, 0))
            raise
        token = uuid.uuid4().hex
        for rank, word_of in zip(others, words, strict=True):
            self._welcome(rank, word_of, b"=" + token.encode())
        return token

    def _welcome(self, rank: int, word: bytes, answer: bytes) -> None:
        self._forget(f"here/{rank}")
        with self._store_errors("meeting"):
            self._store.set(f"welcome/{word.decode()}", answer)

    def _forget(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(key)

    def round(self, stage: str, mine: bytes | Exception, decide: Decide, heard: Heard | None = None) -> bytes:
        if self._token is None:
            raise CheckpointFailed("a round outside of a save or load")
        base = f"{self._token}/{stage}"
        try:
            message = _encode(mine, self.rank)
        except CheckpointFailed as error:
            # The others wait for a message, whatever it says.
            mine, message = error, _encode(error, self.rank)
        if self.rank != 0:
            with self._store_errors(f"the {stage} of a {self.doing}"):
                self._store.set(f"{base}/{self.rank}", message)
            [reply] = self._collect([0], lambda _: f"{base}/reply/{self.rank}", stage)
            self._forget(f"{base}/reply/{self.rank}")
            # A rank's own error is better told with its own type and traceback, unless it is another one's.
            if isinstance(mine, Exception) and not isinstance(mine, PeerFailed):
                raise mine
            return self._decode(reply)
        try:
            others = self._collect(range(1, self.world), lambda rank: f"{base}/{rank}", stage)
            for rank in range(1, self.world):
                self._forget(f"{base}/{rank}")
            messages = [message, *others]
            good = [m[1:] for m in messages if m[:1] == b"="]
            if heard is not None and len(good) < len(messages):
                heard(good)
            self._raise_failures(messages, mine)
            answers = decide([self._decode(m) for m in messages])
            # What many ranks get is in memory once.
            encoded = {key: _encode(one, 0) for key, one in {id(one): one for one in answers}.items()}
            replies = [encoded[id(one)] for one in answers]
        except BaseException as error:
            failure = (
                error if isinstance(error, Exception) else CheckpointFailed(f"the coordinator was stopped: {error!r}")
            )
            with contextlib.suppress(CheckpointFailed):
                self._answer(base, [_encode(failure, 0)] * self.world)
            raise
        self._answer(base, replies)
        return self._decode(replies[0])

    def _decode(self, message: bytes) -> bytes:
        if message[:1] == b"=":
            return message[1:]
        raise self._failure(message)

    def _failure(self, message: bytes) -> HeadraceError:
        fields = _fields(message)
        kind = getattr(errors, fields["kind"], None) if "what" in fields else None
        if kind is CheckpointFailed or (self.doing == "load" and isinstance(kind, type)):
            what, rest = fields["what"], {name: fields[name] for name in _FIELDS[1:]}
            if kind is not CheckpointFailed and issubclass(kind, HeadraceError):
                # A load ends on all ranks with what befell one of them.
                return kind(what if _NAMED.match(what) else f"rank {fields['rank']}: {what}", **rest)
            return CheckpointFailed(what, **rest)
        return CheckpointFailed(
            f"the {self.doing} was given up: rank {fields['rank']} failed",
            found=f"{fields['kind']}: {fields['text']}",
            next_step=_AFTER[self.doing],
        )

    def _raise_failures(self, messages: Sequence[bytes], mine: bytes | Exception) -> None:
        failed = [message for message in messages if message[:1] == b"!"]
        # Who missed what another rank owed it tells nothing new where that one speaks for itself.
        first = [message for message in failed if _fields(message)["kind"] != PeerFailed.__name__]
        failed = first or failed[:1]
        if not failed:
            return
        cause = mine if isinstance(mine, Exception) else None
        if len(failed) == 1:
            if isinstance(cause, HeadraceError) and messages[0] is failed[0]:
                raise cause
            raise self._failure(failed[0]) from cause
        texts = [_fields(message) for message in failed[:4]]
        raise CheckpointFailed(
            f"the {self.doing} was given up: {len(failed)} ranks failed",
            found="; ".join(f"rank {t['rank']}: {t['kind']}: {t['text']}" for t in texts),
            next_step=_AFTER[self.doing],
        ) from cause

    def _answer(self, base: str, replies: Sequence[bytes]) -> None:
        with self._store_errors("answering the ranks"):
            for rank in range(1, self.world):
                self._store.set(f"{base}/reply/{rank}", replies[rank])

    def _collect(
        self, ranks: Sequence[int], key: Callable[[int], str], stage: str, *, patient: bool = False
    ) -> list[bytes]:
        """The values of `key(rank)`, waiting for those that are not there yet. `patient`: a rank may not have begun to
        beat."""
        found: dict[int, bytes] = {}
        began = time.monotonic()
        beats = Beats(self._store, self._stall_s)
        while len(found) < len(ranks):
            for rank in ranks:
                while rank not in found:
                    with self._store_errors(f"the {stage} of a {self.doing}"):
                        if self._wait(key(rank), min(self._stall_s / BEATS, self._deadline_s)):
                            found[rank] = self._bounded(self._store.get(key(rank)), rank)
                            break
                        missing = [r for r in ranks if r not in found and not self._store.check([key(r)])]
                        silent = beats.silent(missing)
                    if rank in missing:
                        self._judge(missing, [] if patient else silent, began, stage)
            if patient:
                # Who gave up while others were waited for has taken its word back, and comes with another one.
                with self._store_errors(f"the {stage} of a {self.doing}"):
                    found = {rank: word for rank, word in found.items() if self._has(key(rank), word)}
        return [found[rank] for rank in ranks]

    def _has(self, key: str, word: bytes) -> bool:
        return self._store.check([key]) and self._store.get(key) == word

    def _bounded(self, message: Any, rank: int) -> bytes:
        data = bytes(message)
        if len(data) > MESSAGE_LIMIT + 1:
            raise _unreadable(f"{len(data)} bytes of rank {rank}")
        return data

    def _wait(self, key: str, seconds: float) -> bool:
        # Asking again: a blocking `wait` of TCPStore logs two warnings each time it times out.
        end = time.monotonic() + seconds
        pauses = looks(self.world)
        while not self._store.check([key]):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(next(pauses), left))
        return True

    def _word(self, key: str) -> bytes | None:
        """What a rank left there; None where it left nothing, or has taken it back just now."""
        with self._store_errors(f"the beginning of a {self.doing}"):
            return self._store.get(key) if self._store.check([key]) else None

    def _judge(self, missing: Sequence[int], silent: Sequence[int], began: float, stage: str) -> None:
        if silent:
            raise self._no_sign_of(silent, f"the {stage} of the {self.doing}", CheckpointFailed)
        # The coordinator gives up first, so that all ranks hear the same verdict from it.
        if time.monotonic() - began >= self._deadline_s + (self._stall_s if self.rank else 0):
            raise CheckpointFailed(
                f"the {self.doing} was given up: {named(missing)} did not finish "
                f"within {format_seconds(self._deadline_s)}",
                where=f"the {stage} of the {self.doing}, as seen by rank {self.rank}",
                next_step=f"{_AFTER[self.doing]}; raise {_LIMITS[self.doing]} if the storage is only slow",
            )

    def _no_sign_of(self, silent: Sequence[int], where: str, kind: type[CheckpointFailed]) -> CheckpointFailed:
        return kind(
            f"the {self.doing} was given up: {named(silent)} gave no sign of life for {format_seconds(self._stall_s)}",
            where=f"{where}, as seen by rank {self.rank}",
            next_step=f"{_AFTER[self.doing]}; see the log of that rank",
        )

    def watch(self, end: Callable[[HeadraceError], None]) -> Watch:
        """While this is entered, `end` is called, once at most and on a thread, when a rank gives no sign of life, or
        has given up by itself (`give_up`)."""
        where = f"the exchange of the {self.doing}"

        def silent(ranks: list[int]) -> bytes:
            error = self._no_sign_of(ranks, where, PeerFailed)
            end(error)
            return _encode(error, self.rank)

        def gone(error: dist.DistError) -> None:
            try:
                with self._store_errors(where):
                    raise error
            except HeadraceError as told:
                end(told)

        def given_up(word: bytes) -> None:
            try:
                end(self._failure(word))
            except HeadraceError as error:
                end(error)

        self._watched = True
        return Watch(self._client(), f"{self.token}/word", self.rank, self.world, self._stall_s, silent, given_up, gone)

    def give_up(self, error: Exception) -> None:
        """Those that `watch` wait no longer: this rank has left the exchange with an error."""
        with contextlib.suppress(dist.DistError):
            self._store.set(f"{self.token}/word", _encode(error, self.rank))

    def pulse(self) -> Pulse:
        """Beats outside of saves and loads, too."""
        return Pulse(self._client(), self.rank, self._stall_s)

    def said(self, key: str, mine: bytes, stage: str) -> bytes:
        """What rank 0 gives, on every rank; it waits for nobody, and must beat (`pulse`)."""
        with self._store_errors(f"the {stage} of a {self.doing}"):
            if self.rank == 0:
                self._store.set(key, mine)
                return mine
        [found] = self._collect([0], lambda _: key, stage)
        with self._store_errors(f"the {stage} of a {self.doing}"):
            if self._store.add(f"{key}/heard", 1) == self.world - 1:
                self._forget(key)
                self._forget(f"{key}/heard")
        return found

    @contextlib.contextmanager
    def _store_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise CheckpointFailed(
                f"the store through which the ranks talk is gone while {doing}",
                where=f"rank {self.rank}",
                found=str(error).splitlines()[0],
                next_step="the process that holds it (rank 0, or torchrun on its node) ended, or cannot be reached",
            ) from error


def looks(world: int) -> Iterator[float]:
    """Seconds between the looks of a rank for what is not there yet, ever longer.

    In the long run all ranks together look at most STORE_QUESTIONS_PER_S times a second, and each twenty times. Where
    they are few, what comes late is found when a tenth more of that time has passed, at the latest.
    """
    pause, all_of_them = 0.0005, world / STORE_QUESTIONS_PER_S
    while True:
        yield pause
        pause = min(pause * (1.5 if pause < all_of_them else 1.1), max(0.05, all_of_them))


def named(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _fields(message: bytes) -> dict[str, Any]:
    """Of an error that `_encode` made."""
    try:
        fields = json.loads(message[1:])
        told = _FIELDS if "what" in fields else ()
        good = isinstance(fields["rank"], int) and all(isinstance(fields[name], str) for name in ("kind", "text"))
        good = good and all(isinstance(fields[name], str | None) for name in told)
    except (ValueError, LookupError, TypeError, RecursionError):
        good = False
    if not good:
        raise _unreadable(repr(message[:80]))
    return dict(fields)


def _unreadable(found: str) -> CheckpointFailed:
    return CheckpointFailed(
        "what lies in the store of the job in the place of a message is none",
        found=found,
        next_step="who else writes there?",
    )


def _encode(value: bytes | Exception, rank: int) -> bytes:
    if not isinstance(value, Exception):
        if len(value) > MESSAGE_LIMIT:
            raise CheckpointFailed(
                "a message between ranks is too long", expected=f"{MESSAGE_LIMIT}", found=f"{len(value)}"
            )
        return b"=" + value
    # Text, not a pickle: an error may hold anything, and what arrives here is not trusted with code.
    fields: dict[str, Any] = {"rank": rank, "kind": type(value).__name__, "text": str(value)}
    if isinstance(value, HeadraceError):
        fields |= {name: getattr(value, name) for name in _FIELDS}
    return b"!" + json.dumps(fields).encode()
