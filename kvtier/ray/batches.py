"""A batch as an actor: Ray starts it again where it is killed, and its journal says what is left.

What must not live here: the batch itself (`kvtier.batch`).
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

import ray
from ray.exceptions import ActorAlreadyExistsError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.batch.command import tell
from kvtier.batch.directory import HeldError
from kvtier.batch.rows import Json, Row
from kvtier.batch.running import run
from kvtier.batch.settings import BatchConfig
from kvtier.batch.summary import summary_of
from kvtier.config import load
from kvtier.errors import ConfigError, KvtierError, UnavailableError
from kvtier.ray.datasets import dataset_rows

_HELD_S_MAX: Final = 30.0
_LOOK_S: Final = 0.2
_READERS: Final = {"parquet": "read_parquet", "json": "read_json", "csv": "read_csv"}


class BatchActor:
    """Does one batch. Its method may be called again and again."""

    def run(self, argv: Sequence[str], urls: Sequence[str], data: str) -> dict[str, object]:
        """Do what is left of the batch; its summary. KvtierError."""
        config = config_of(argv, urls)
        rows = (lambda defaults: _rows(data, defaults)) if data else None
        until = time.monotonic() + _HELD_S_MAX
        while True:
            try:
                return summary_of(run(config, tell, rows, data), config)
            except HeldError:
                # Whoever was killed in the midst of it may be ending still.
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


def config_of(argv: Sequence[str], urls: Sequence[str]) -> BatchConfig:
    """The batch that flags ask for, sent to the fleet's routers unless they name some."""
    loaded = load(BatchConfig, argv)
    return loaded.config if "urls" in loaded.origins else replace(loaded.config, urls=tuple(urls))


def submit(argv: Sequence[str], urls: Sequence[str], data: str = "") -> dict[str, object]:
    """Have a batch done on this node, where its files are; its summary. Blocks. KvtierError.

    `data` is FORMAT:PATH of a data set of Ray, in place of `inputs`.
    """
    if data and data.partition(":")[0] not in _READERS:
        raise ConfigError(f"--ray-data {data}: want {'|'.join(_READERS)}:PATH")
    node = ray.get_runtime_context().get_node_id()
    out = config_of(argv, urls).out
    if out is None:
        raise ConfigError("out is required: the directory of results")
    actor = ray.remote(BatchActor).options(
        name=f"batch-{hashlib.sha256(bytes(out.absolute())).hexdigest()[:16]}",
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    try:
        summary = ray.get(actor.remote().run.remote(list(argv), list(urls), data))
    except ActorAlreadyExistsError:
        raise UnavailableError(f"another job works on {out}") from None
    except RayTaskError as error:
        if isinstance(error.cause, KvtierError):
            raise error.cause from None  # without the actor's traceback
        raise
    return cast("dict[str, object]", summary)


def _rows(data: str, defaults: Json) -> Iterator[Row]:
    try:
        from ray import data as ray_data  # needs pandas and pyarrow: only who asks for it
    except ImportError as error:
        raise ConfigError(f"--ray-data needs Ray Data: pip install 'ray[data]' ({error})") from None
    form, _, path = data.partition(":")
    return dataset_rows(getattr(ray_data, _READERS[form])(path), defaults)
