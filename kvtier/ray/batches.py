"""A batch as an actor: Ray starts it again where it is killed, and its journal says what is left.

What must not live here: the batch itself (`kvtier.batch`).
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.batch.command import tell
from kvtier.batch.rows import Json, Row
from kvtier.batch.running import run
from kvtier.batch.settings import BatchConfig
from kvtier.batch.summary import summary_of
from kvtier.config import load
from kvtier.errors import ConfigError, UnavailableError
from kvtier.ray.datasets import dataset_rows

_HELD_S_MAX: Final = 30.0
_LOOK_S: Final = 0.2
_READERS: Final = {"parquet": "read_parquet", "json": "read_json", "csv": "read_csv"}


class BatchActor:
    """Does one batch. Its method may be called again and again."""

    def run(self, argv: Sequence[str], urls: Sequence[str], data: str) -> dict[str, object]:
        """Do what is left of the batch; its summary. KvtierError."""
        config = config_of(argv, urls)
        until = time.monotonic() + _HELD_S_MAX
        while True:
            try:
                ended = run(
                    config, tell, None if not data else lambda told: _rows(data, told), data
                )
                return summary_of(ended, config)
            except UnavailableError as error:
                # Whoever was killed in the midst of it may be ending still.
                if "another process" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


def config_of(argv: Sequence[str], urls: Sequence[str]) -> BatchConfig:
    """The batch that flags ask for, sent to the fleet's routers unless they name some."""
    loaded = load(BatchConfig, argv)
    return loaded.config if "urls" in loaded.origins else replace(loaded.config, urls=tuple(urls))


def submit(argv: Sequence[str], urls: Sequence[str], data: str = "") -> dict[str, object]:
    """Have a batch done on this node, where its files are; its summary. Blocks.

    `data` is FORMAT:PATH of a data set of Ray, in place of `inputs`.
    """
    if data and data.partition(":")[0] not in _READERS:
        raise ConfigError(f"--ray-data {data}: want {'|'.join(_READERS)}:PATH")
    node = ray.get_runtime_context().get_node_id()
    out = config_of(argv, urls).out
    name = hashlib.sha256(str(out and Path(out).absolute()).encode()).hexdigest()[:16]
    actor = ray.remote(BatchActor).options(
        name=f"batch-{name}",
        get_if_exists=False,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    summary = ray.get(actor.remote().run.remote(list(argv), list(urls), data))
    return cast("dict[str, object]", summary)


def _rows(data: str, defaults: Json) -> Iterator[Row]:
    from ray import data as ray_data  # needs pandas and pyarrow: only who asks for it

    form, _, path = data.partition(":")
    return dataset_rows(getattr(ray_data, _READERS[form])(path), defaults)
