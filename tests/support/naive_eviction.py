"""Eviction policies as plain lists, slow and obvious: the oracles of the policies in the core."""

from collections.abc import Iterable, Sequence

from kvtier.core.eviction import (
    PRIORITY_DEFAULT,
    PinToken,
    Removal,
    Retention,
    S3FifoConfig,
    TouchOrder,
)


class NaivePins:
    """Counted pins with a token for each generation of a key."""

    def __init__(self) -> None:
        self.drawn = 0
        self.held: dict[int, list[PinToken]] = {}

    def pin(self, key: int) -> PinToken:
        if key in self.held:
            token = self.held[key][0]
        else:
            self.drawn += 1
            token = PinToken(self.drawn)
        self.held.setdefault(key, []).append(token)
        return token

    def unpin(self, key: int, token: PinToken) -> bool:
        tokens = self.held.get(key, [])
        if token not in tokens:
            return False
        tokens.pop()
        if not tokens:
            del self.held[key]
        return not tokens


class NaiveLru:
    """A list, oldest first."""

    def __init__(self, touch_order: TouchOrder = TouchOrder.TAIL_FIRST) -> None:
        self.keys: list[int] = []
        self.pins = NaivePins()
        self.touch_order = touch_order

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def on_stored(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        self.keys += [k for k in dict.fromkeys(keys) if k not in self.keys]
        self.on_touched(keys, now)

    def on_touched(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for key in reversed(keys) if self.touch_order is TouchOrder.TAIL_FIRST else keys:
            if key in self.keys:
                self.keys.remove(key)
                self.keys.append(key)

    def on_removed(self, keys: Iterable[int], removal: Removal = Removal.EVICTED) -> None:
        for key in keys:
            if key in self.keys:
                self.keys.remove(key)
            self.pins.held.pop(key, None)

    def victims(self, count: int, now: float) -> list[int]:
        return [k for k in self.keys if k not in self.pins.held][:count]

    def pin(self, key: int) -> PinToken:
        return self.pins.pin(key)

    def unpin(self, key: int, token: PinToken) -> None:
        self.pins.unpin(key, token)


class NaiveS3Fifo:
    """Two lists of [key, uses], next to leave first; `met` holds pinned keys out of the lists."""

    def __init__(self, config: S3FifoConfig) -> None:
        self.config = config
        self.small_max = int(config.capacity_blocks * config.small_ratio)
        self.lists: dict[str, list[list[int]]] = {"small": [], "main": []}
        self.met: dict[str, list[list[int]]] = {"small": [], "main": []}
        self.ghosts: list[int] = []
        self.evicted_any = False
        self.pins = NaivePins()

    def __len__(self) -> int:
        return self.size("small") + self.size("main")

    def __contains__(self, key: object) -> bool:
        return any(entry[0] == key for entry in self.entries())

    def size(self, name: str) -> int:
        return len(self.lists[name]) + len(self.met[name])

    def entries(self) -> list[list[int]]:
        return [e for part in (self.lists, self.met) for entries in part.values() for e in entries]

    def on_stored(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for key in reversed(keys) if self.config.touch_order is TouchOrder.TAIL_FIRST else keys:
            if key in self:
                self.on_touched([key], now)
                continue
            filling = not self.evicted_any and self.size("small") >= self.small_max
            name = "main" if key in self.ghosts or filling else "small"
            self.ghosts = [g for g in self.ghosts if g != key]
            self.lists[name].append([key, 0])
        self.trim()

    def trim(self) -> None:
        ghosts_max = int(self.config.capacity_blocks * self.config.ghost_ratio)
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - ghosts_max) :]

    def on_touched(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for key in keys:
            for entry in self.entries():
                if entry[0] == key:
                    entry[1] = min(3, entry[1] + 1)

    def on_removed(self, keys: Iterable[int], removal: Removal = Removal.EVICTED) -> None:
        self.trim()
        for key in keys:
            for name in ("small", "main"):
                for part in (self.lists, self.met):
                    if any(e[0] == key for e in part[name]):
                        part[name] = [e for e in part[name] if e[0] != key]
                        if removal is Removal.EVICTED:
                            self.evicted_any = True
                            if name == "small":
                                self.ghosts.append(key)
            self.pins.held.pop(key, None)

    def victims(self, count: int, now: float) -> list[int]:
        chosen: list[tuple[str, list[int]]] = []
        small, main = self.lists["small"], self.lists["main"]
        main_max = self.config.capacity_blocks - self.small_max
        name = ""
        while len(chosen) < count and (small or main):
            # Stay with a queue until it gave one key or ran empty.
            if not name or not self.lists[name]:
                name = "main" if main and (self.size("main") > main_max or not small) else "small"
            entry = self.lists[name].pop(0)
            if entry[0] in self.pins.held:
                self.met[name].append(entry)
            elif name == "small" and entry[1] >= self.config.promote_uses:
                main.append([entry[0], 0])
            elif name == "main" and entry[1]:
                main.append([entry[0], entry[1] - 1])
            else:
                chosen.append((name, entry))
                name = ""
        for name, entry in reversed(chosen):
            self.lists[name].insert(0, entry)
        return [entry[0] for _, entry in chosen]

    def pin(self, key: int) -> PinToken:
        return self.pins.pin(key)

    def unpin(self, key: int, token: PinToken) -> None:
        if self.pins.unpin(key, token):
            for name, entries in self.met.items():
                for entry in [e for e in entries if e[0] == key]:
                    entries.remove(entry)
                    self.lists[name].insert(0, entry)


class NaivePriority:
    """Every question is answered by looking at all keys."""

    def __init__(self) -> None:
        self.worth: dict[int, tuple[int, float | None]] = {}
        self.used: list[int] = []
        self.children: dict[int, set[int]] = {}
        self.pins = NaivePins()

    def __len__(self) -> int:
        return len(self.used)

    def __contains__(self, key: object) -> bool:
        return key in self.used

    def on_stored(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        parent: int | None = None
        for key in keys:
            if key not in self.used:
                self.used.append(key)
                self.worth[key] = (35, None)
                self.children[key] = set()
                if parent is not None:
                    self.children[parent].add(key)
            parent = key
        self.on_touched(keys, now, retention)

    def on_touched(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for i, key in reversed(list(enumerate(keys))):
            if key in self.used:
                self.used.remove(key)
                self.used.append(key)
                if retention:
                    self.worth[key] = (retention[i].priority, retention[i].expires_at)

    def on_removed(self, keys: Iterable[int], removal: Removal = Removal.EVICTED) -> None:
        for key in keys:
            if key in self.used:
                self.used.remove(key)
                del self.children[key]
                for children in self.children.values():
                    children.discard(key)
            self.pins.held.pop(key, None)

    def victims(self, count: int, now: float) -> list[int]:
        for key, (_, expires_at) in list(self.worth.items()):
            if expires_at is not None and expires_at <= now:
                self.worth[key] = (35, None)
        left = list(self.used)
        chosen: list[int] = []
        while len(chosen) < count:
            leaves = [
                k for k in left if k not in self.pins.held and not self.children[k] & set(left)
            ]
            if not leaves:
                break
            chosen.append(min(leaves, key=lambda k: (self.worth[k][0], self.used.index(k))))
            left.remove(chosen[-1])
        return chosen

    def pin(self, key: int) -> PinToken:
        return self.pins.pin(key)

    def unpin(self, key: int, token: PinToken) -> None:
        self.pins.unpin(key, token)


class NaiveRanked:
    """Rows of priority, deadline and last use; lowest priority first, of equals the oldest."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, float | None, int]] = {}
        self.told: dict[int, int] = {}
        self.clock = 0
        self.pins = NaivePins()

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def on_stored(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for key in keys:
            self.rows.setdefault(key, (PRIORITY_DEFAULT, None, 0))
        self.on_touched(keys, now, retention)

    def on_touched(
        self, keys: Sequence[int], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        for key, worth in zip(keys, retention, strict=False):
            if key in self.rows and key not in self.pins.held:
                over = worth.expires_at is not None and worth.expires_at <= now
                rank = PRIORITY_DEFAULT if over else worth.priority
                until = None if rank == PRIORITY_DEFAULT else worth.expires_at
                self.rows[key] = (rank, until, self.rows[key][2])
                self.told[key] = self._next()
        for key in reversed(keys):
            if key in self.rows:
                self.rows[key] = (*self.rows[key][:2], self._next())

    def on_removed(self, keys: Iterable[int], removal: Removal = Removal.EVICTED) -> None:
        for key in keys:
            self.rows.pop(key, None)
            self.pins.held.pop(key, None)

    def victims(self, count: int, now: float) -> list[int]:
        over = [(u, self.told[k], k) for k, (_, u, _) in self.rows.items() if u and u <= now]
        for _, _, key in sorted(over):
            rank, _, stamp = self.rows[key]
            if key in self.pins.held:
                self.rows[key] = (rank, now + 1.0, stamp)
                self.told[key] = self._next()
            else:
                self.rows[key] = (PRIORITY_DEFAULT, None, self._next())
        free = [k for k in self.rows if k not in self.pins.held]
        return sorted(free, key=lambda k: (self.rows[k][0], self.rows[k][2]))[:count]

    def pin(self, key: int) -> PinToken:
        return self.pins.pin(key)

    def unpin(self, key: int, token: PinToken) -> None:
        self.pins.unpin(key, token)

    def _next(self) -> int:
        self.clock += 1
        return self.clock
