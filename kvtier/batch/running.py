"""A batch from its rows to its summary: what is there is not done again.

Rows go out in the order of the plan, `window` at a time. A row whose prompt begins like an earlier
one's waits until that one is answered: by then the cache has what they share. Rows of other groups
are sent meanwhile. What must not live here: command lines, Ray.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import aiohttp
import uvloop

from kvtier.batch.answers import Totals
from kvtier.batch.directory import (
    RESULTS,
    SUMMARY,
    BatchDirectory,
    Entry,
    Plan,
    digest_of,
    row_at,
)
from kvtier.batch.journal import Journal, Recovered, is_done, journal_of, line_of, recover
from kvtier.batch.prefixes import Walk
from kvtier.batch.reading import read_rows
from kvtier.batch.rows import Json, Row
from kvtier.batch.sending import Sender, Terms, model_of
from kvtier.batch.settings import BatchConfig
from kvtier.batch.summary import Progress, Run, summary_of
from kvtier.errors import BackendError, CallerError, ConfigError, KvtierError
from kvtier.openai.strict_json import parse_object

SHARED_BYTES_MIN: Final = 256
"""Less in common is not waited for: computing it twice costs less than the pause."""
_CONNECT_S_MAX: Final = 10.0

Rows = Callable[[Json], Iterator[Row]]
"""Makes the rows of a batch, given the fields that each has by default."""
Tell = Callable[[str], None]


def run(config: BatchConfig, tell: Tell, rows: Rows | None = None, source: str = "") -> Run:
    """Do what is left of a batch and write its summary. Blocks.

    `rows` are read in place of `config.inputs`, and `source` names them: started again with
    another name in the same directory, it is refused. KvtierError; what is done stays done.
    """
    if config.out is None:
        raise ConfigError("out is required: the directory of results")
    if bool(config.inputs) == (rows is not None):
        raise ConfigError("inputs is required: at least one file")
    directory = BatchDirectory(config.out.expanduser().absolute())
    with directory.held():
        return uvloop.run(_run(_Job(config, directory, tell), rows, source))


@dataclass(frozen=True, slots=True)
class _Job:
    config: BatchConfig
    directory: BatchDirectory
    tell: Tell


async def _run(job: _Job, rows: Rows | None, source: str) -> Run:
    began = time.monotonic()
    plan = await asyncio.to_thread(_planned, job, rows, source)
    results = job.directory.root / RESULTS
    found = await asyncio.to_thread(recover, results, plan.rows)
    before, totals = found.totals.rows, found.totals
    job.tell(f"{plan.rows} rows, {before} done, {plan.rows - before} to do")
    if before < plan.rows:
        try:
            await _send_all(job, plan, found)
        except BaseExceptionGroup as errors:
            known, others = errors.split(KvtierError)
            if known is None or others is not None:
                raise
            raise _first(known) from None
    ended = Run(plan, totals, before, time.monotonic() - began)
    try:
        job.directory.replace(SUMMARY, summary_of(ended, job.config))
    except OSError as error:
        raise BackendError(f"{job.directory.root / SUMMARY}: {error.strerror}") from error
    return ended


def _planned(job: _Job, rows: Rows | None, source: str) -> Plan:
    """The plan that is there, if it is of the same input; else it is made."""
    config, directory = job.config, job.directory
    files = {name: _stamp(Path(name)) for name in config.inputs}
    digest = digest_of(config, files or {source: (0, 0)})
    plan = directory.plan()
    if plan is not None:
        if plan.source != digest:
            raise CallerError(
                f"{directory.root} is of other inputs or settings: take another out, or remove it"
            )
        return plan
    if (directory.root / RESULTS).exists():
        raise CallerError(f"{directory.root} holds results of something else")
    defaults = parse_object(config.body.encode())
    job.tell("reading and grouping rows")
    paths = [Path(name) for name in config.inputs]
    read = read_rows(paths, defaults) if rows is None else rows(defaults)
    return directory.prepare(read, config, digest)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise BackendError(f"{path}: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


async def _send_all(job: _Job, plan: Plan, found: Recovered) -> None:
    config = job.config
    timeout = aiohttp.ClientTimeout(total=config.answer_s_max, connect=_CONNECT_S_MAX)
    connector = aiohttp.TCPConnector(limit=config.window)
    async with (
        aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=_credentials(config)
        ) as session,
        journal_of(job.directory.root / RESULTS) as journal,
    ):
        urls = [url.rstrip("/").removesuffix("/v1") for url in config.urls]
        model = config.model or await model_of(session, urls, config.outage_s_max)
        sender = Sender(session, Terms(urls, model, config.answer_s_max, config.outage_s_max))
        with _opened(job.directory) as file:
            sending = _Sending(config, sender, journal, file, found.totals)
            sending.progress = Progress(plan.rows, found.totals.rows, job.tell)
            await sending.all(job.directory.entries(), found.done)


class _Sending:
    """Takes entries in order and has them sent."""

    def __init__(
        self,
        config: BatchConfig,
        sender: Sender,
        journal: Journal,
        rows: BinaryIO,
        totals: Totals,
    ) -> None:
        self._sender = sender
        self._journal = journal
        self._rows = rows
        self._totals = totals
        self._window = asyncio.Semaphore(config.window)
        self._lookahead = asyncio.Semaphore(config.lookahead)
        self._walk: Walk[asyncio.Event] = Walk()
        self.progress: Progress | None = None

    async def all(self, entries: Iterator[Entry], done: bytearray) -> None:
        """Send every entry that is not done. ExceptionGroup of KvtierError."""
        async with asyncio.TaskGroup() as group:
            for entry in entries:
                answered = asyncio.Event()
                first = self._walk.enter(entry.shared, entry.depth, answered)
                if is_done(done, entry.number):
                    answered.set()
                    continue
                await self._lookahead.acquire()
                needed = first if entry.shared >= SHARED_BYTES_MIN else None
                group.create_task(self._one(entry, needed, answered))

    async def _one(
        self, entry: Entry, needed: asyncio.Event | None, answered: asyncio.Event
    ) -> None:
        if needed is not None:
            await needed.wait()
        async with self._window:
            row = await asyncio.to_thread(row_at, self._rows, entry)
            outcome = await self._sender.send(row)
            answered.set()
            await self._journal.append(line_of(entry.number, row.custom_id, outcome))
        self._totals.add(outcome)
        self._lookahead.release()
        if self.progress is not None:
            self.progress.done(failed=not outcome.is_well)


@contextlib.contextmanager
def _opened(directory: BatchDirectory) -> Iterator[BinaryIO]:
    try:
        file = directory.opened()
    except OSError as error:
        raise BackendError(f"{directory.root}: {error.strerror}") from error
    with file:
        yield file


def _credentials(config: BatchConfig) -> Mapping[str, str]:
    if config.api_key_file is None:
        return {}
    try:
        key = config.api_key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BackendError(f"{config.api_key_file}: {error.strerror}") from error
    return {"authorization": f"Bearer {key}"}


def _first(errors: BaseExceptionGroup[KvtierError]) -> KvtierError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, KvtierError)
    return found


def read_summary(out: Path) -> Mapping[str, object]:
    """The summary of a finished batch. BackendError where there is none."""
    try:
        told = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"{out / SUMMARY} cannot be read") from error
    assert isinstance(told, dict)
    return told
