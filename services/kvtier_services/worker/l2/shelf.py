"""Where workers of one namespace leave lists of their hot sets: a few places in the store.

A place is a name, as any block's; the list lies there as blocks do, verified and evicted the same
way, and goes wherever the store's tiers go. A worker finds the list that it left under its own name
in its last life; one whose name left none takes the list of another, chosen by rendezvous of both
names, so that several newcomers spread. Nothing is taken away: a list is replaced when its owner
ends again. What must not live here: what is in a list (`hot_record`), what is done with it.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Final

from kvtier.client.store import BlockStoreClient, ReadTerms
from kvtier.core.frame import FrameName
from kvtier.errors import CallerError
from kvtier.types import Fingerprint, InstanceId
from kvtier_services.worker.l2.heat import HotSet
from kvtier_services.worker.l2.hot_record import (
    PAGE_BYTES_MIN,
    Page,
    decode,
    encode,
    joined,
    page_name,
)

PLACES_COUNT: Final = 32
"""Lists of one namespace at once; where all are taken, a worker overwrites another's."""


class HotSetShelf:
    """Lists of hot sets of one namespace, through the store's client; on the client's loop."""

    def __init__(
        self,
        client: BlockStoreClient,
        namespace: Fingerprint,
        page_bytes: int,
        instance: InstanceId,
    ) -> None:
        """`page_bytes` is the length of the namespace's blocks."""
        self._client = client
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._instance = instance

    async def leave(self, hot: HotSet, deadline_s: float) -> bool:
        """Replace what this instance left before; whether it is there now.

        UnauthenticatedError and ForbiddenError where the store refuses this worker.
        """
        if self._page_bytes < PAGE_BYTES_MIN:
            return False
        until = time.monotonic() + deadline_s
        pages = encode(self._instance, hot, self._page_bytes, secrets.randbits(64))
        found = await self._heads(until)
        own = [place for place, page in found.items() if page.instance == self._instance]
        for place in own:
            await self._client.drop(self._names(place, found[place].pages_count))
        order = self._order()
        free = [place for place in order if place in own or place not in found]
        names = self._names(free[0] if free else order[0], len(pages))
        if not free:
            await self._client.drop(names)
        put = await self._client.put_many(names, pages, deadline_s=_left(until))
        return all(result.is_held for result in put)

    async def find(self, deadline_s: float) -> tuple[InstanceId, HotSet] | None:
        """Whose list is this worker's to take, and the list; None where there is none.

        Errors as `leave`. What is there and cannot be read is as if it were not.
        """
        if self._page_bytes < PAGE_BYTES_MIN:
            return None
        until = time.monotonic() + deadline_s
        found = await self._heads(until)
        ranked = sorted(found.items(), key=lambda one: self._rank(one[1].instance), reverse=True)
        for place, head in ranked:
            rest = await self._read(self._names(place, head.pages_count)[1:], until)
            hot = joined([head, *(page for page in rest if page is not None)])
            if hot:
                return head.instance, hot
        return None

    async def _heads(self, until: float) -> dict[int, Page]:
        """First pages, by place."""
        places = self._order()
        names = [page_name(self._namespace, place, 0) for place in places]
        held = await self._client.contains(names, shared=True, deadline_s=_left(until))
        found: dict[int, Page] = {}
        for place, name, tiers in zip(places, names, held, strict=True):
            if tiers:
                (page,) = await self._read([name], until)
                if page is not None:
                    found[place] = page
        return found

    async def _read(self, names: Sequence[FrameName], until: float) -> list[Page | None]:
        if not names:
            return []
        terms = ReadTerms(payload_bytes=self._page_bytes)
        results = await self._client.get_many(names, None, terms, deadline_s=_left(until))
        pages: list[Page | None] = []
        for result in results:
            page = None
            if result.payload is not None:
                try:
                    page = decode(result.payload)
                except CallerError:
                    page = None
            pages.append(page)
        return pages

    def _names(self, place: int, pages_count: int) -> list[FrameName]:
        return [page_name(self._namespace, place, page) for page in range(pages_count)]

    def _order(self) -> list[int]:
        """Places in the order in which this worker would have them."""
        first = int.from_bytes(hashlib.sha256(self._instance.encode()).digest()[:8], "little")
        return [(first + step) % PLACES_COUNT for step in range(PLACES_COUNT)]

    def _rank(self, owner: InstanceId) -> tuple[bool, bytes]:
        """How much a list is this worker's: its own before all."""
        told = f"{len(owner)}:{owner}{self._instance}".encode()
        return owner == self._instance, hashlib.sha256(told).digest()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
