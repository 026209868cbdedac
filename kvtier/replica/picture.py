"""What one index's Snapshot stream has told so far: holders, blocks and reservations.

One stream fills one picture; another stream fills another one beside it, and the replica changes
over when that is worth it. What must not live here: connections, threads, which picture is asked.
"""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvtier.core.fleet import Chain, Fleet, HolderInfo
from kvtier.core.identity import Pool
from kvtier.core.prefix_index import MatchResult, PrefixIndex
from kvtier.core.workers import HolderView, OwnReservation
from kvtier.errors import CallerError
from kvtier.limits import BATCH_BLOCKS_MAX
from kvtier.replica.predictions import ForeignReservations, OwnReservations
from kvtier.types import Fingerprint, HolderId, HolderKind, Trust
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb


class Picture:
    """Written by the thread that feeds it; `match`, `chains` and `holders` may be read by any."""

    def __init__(self, index: PrefixIndex, own: OwnReservations) -> None:
        self.index = index
        self.fleet = Fleet(index)
        self.holders: dict[HolderId, HolderView] = {}
        """Values are replaced, never changed. Iterate over a copy."""
        self.changes_count = 0
        """Grows with each change of `holders`."""
        self.foreign = ForeignReservations(index)
        self.position = 0
        self.index_epoch = 0
        self.is_complete = False
        self.completed_at = 0.0
        self.heard_at = 0.0
        self.messages_count = 0
        self._own = own
        self._said: dict[HolderId, bytes] = {}
        """Each holder's description in bytes: most Holder messages only bring a new load."""
        self._chains: dict[str, tuple[Chain, ...]] = {}
        self._membership = threading.Lock()

    # ---- reading

    def match(self, hashes: npt.NDArray[np.uint64], pool: Pool | None) -> MatchResult:
        return self.fleet.match(hashes, pool)

    def chains(self, served_name: str) -> tuple[Chain, ...]:
        """As `Fleet.chains`, remembered until the fleet changes."""
        known = self._chains.get(served_name)
        if known is None:
            with self._membership:
                known = self.fleet.chains(served_name)
                if known:  # names that nobody serves come from outside: do not remember them
                    self._chains[served_name] = known
        return known

    def knows(self, other: "Picture") -> bool:
        """Whether each visible holder of `other` is here too, and not worse known."""
        names = {view.info.key: view for view in self.holders.values()}
        for theirs in tuple(other.holders.values()):
            if theirs.is_hidden:
                continue
            ours = names.get(theirs.info.key)
            if ours is None or (ours.trust is Trust.DEGRADED and theirs.trust is Trust.EXACT):
                return False
        return True

    # ---- the stream

    def take(self, message: pb.SnapshotResponse, now: float) -> None:
        """Apply one message. CallerError or IdentityError where it makes no sense here."""
        match message.WhichOneof("message"):
            case "group":
                for one in message.group.messages:
                    self._take_part(one, now)
                return
            case "batch":
                part = message.batch
                self.index.apply(HolderId(part.holder), part.shard, convert.batch_from(part.batch))
            case "holder":
                self._take_holder(message.holder, now)
            case "blocks":
                self._take_blocks(message.blocks)
            case "prediction":
                self._take_prediction(message.prediction, now)
            case "removed_holder":
                self._take_removed(HolderId(message.removed_holder))
            case "complete":
                self.is_complete = True
                self.completed_at = now
            case "heartbeat":
                pass
            case kind:
                raise CallerError(f"the index sent {kind}, which this version does not know")
        self.position = message.position
        self.index_epoch = message.index_epoch
        self.heard_at = now
        self.messages_count += 1

    def tick(self, now: float) -> None:
        """End reservations of others that have expired."""
        self.foreign.tick(now)

    def predict(self, own: OwnReservation, ticket: int, expires_at: float) -> None:
        """Expect the blocks of one of our own, if its worker is known here."""
        holder = self.fleet.find_worker(own.worker.instance, own.worker.dp_rank)
        if holder is not None and len(own.hashes):
            # A worker with too many tickets takes no more of them: they are hints.
            with contextlib.suppress(CallerError):
                self.index.predict(holder, own.hashes, ticket, expires_at)

    # ---- parts

    def _take_part(self, data: bytes, now: float) -> None:
        """Apply one message of a group."""
        try:
            part = pb.SnapshotResponse.FromString(data)
        except DecodeError as error:
            raise CallerError("a group of the index contains what is no message") from error
        if part.HasField("group"):
            raise CallerError("a group of the index contains a group")
        self.take(part, now)

    def _take_holder(self, message: pb.Holder, now: float) -> None:
        holder = HolderId(message.holder)
        info = self._join(holder, message)
        was_hidden = holder in self.holders and self.holders[holder].is_hidden
        if message.hidden != was_hidden:
            (self.fleet.hide if message.hidden else self.fleet.resume)(holder)
        self.holders[holder] = holders.view_from(message, info, now)
        self.changes_count += 1

    def _join(self, holder: HolderId, message: pb.Holder) -> HolderInfo:
        """The holder's description; its shards enter the fleet where anything of it is new."""
        hello = message.hello
        hello.seq = 0  # grows all the time and says nothing here
        said = hello.SerializeToString() + b"".join(
            len(part).to_bytes(2, "little") + part for part in message.namespaces
        )
        if said == self._said.get(holder):
            return self.holders[holder].info
        info = convert.info_from(hello)
        with self._membership:
            known = [
                replace(info, shard_index=shard, namespace=Fingerprint(namespace))
                for shard, namespace in enumerate(message.namespaces)
                if namespace
            ]
            for shard_info in known or [info]:
                self.fleet.join(shard_info, holder)
            self._chains = {}
        self._said[holder] = said
        return info

    def _take_blocks(self, message: pb.HolderBlocks) -> None:
        holder = HolderId(message.holder)
        if message.number == 0:
            self.index.clear(holder, shard=message.shard)
        batch = convert.batch_from(message.batch)
        if batch.events_count:
            self.index.apply(holder, message.shard, batch)

    def _take_removed(self, holder: HolderId) -> None:
        if holder not in self.holders:
            return
        self.foreign.holder_left(holder)
        with self._membership:
            self.fleet.leave(holder)
            self._chains = {}
        del self.holders[holder], self._said[holder]
        self.changes_count += 1

    def _take_prediction(self, message: pb.Prediction, now: float) -> None:
        if message.over:
            self.foreign.end(message.ticket)
            return
        holder = HolderId(message.holder)
        view = self.holders.get(holder)
        if view is None or view.info.kind is not HolderKind.WORKER:
            raise CallerError(f"a reservation for holder {holder}, which is no known worker")
        if self._own.is_own(message.router, message.key):
            return
        hashes = convert.u64_column("prediction", message.hashes, BATCH_BLOCKS_MAX)
        expires_at = now + message.ttl_ms / 1000
        self.foreign.add(message.ticket, holder, message.prefill_tokens, hashes, expires_at)
