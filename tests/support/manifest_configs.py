"""What the processes of a manifest are told, read by the loaders of our services, and the memory
that this will take.

What must not live here: processes.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from kvtier.config import Root, load
from kvtier.engines.vllm.settings import Settings, settings_from
from kvtier.limits import ENGINE_HELD_BYTES_MAX, NVME_UNSAVED_BYTES_MAX
from kvtier_router.config import RouterConfig
from kvtier_services.bridge.config import BridgeConfig
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.worker.config import WorkerConfig
from tests.support.manifests import Object, Overlay, Workload, argv_of, number_of

MIB = 1 << 20
CONFIGS: dict[str, type[Root]] = {
    "index": IndexConfig,
    "store": StoreConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "bridge": BridgeConfig,
}
FIELDS = {
    "status.podIP": "10.1.2.3",
    "metadata.name": "pod-0",
    "metadata.namespace": "kvtier",
    "spec.nodeName": "node-1",
}
"""Of the downward API, where no pod is there."""
KEY = "kvtier_test_key_0123456789"
SECRETS: dict[str, dict[str, bytes]] = {
    "kvtier-router": {
        "cluster_secret": b"a secret of at least sixteen bytes",
        "keys.toml": (
            f'[[tenant]]\nid = "team"\n[[tenant.key]]\n'
            f'sha256 = "{sha256(KEY.encode()).hexdigest()}"\n'
        ).encode(),
    },
    "kvtier-engine": {"api_key": b"engines_key_0123456789"},
}
"""What an operator makes by hand."""
_PROCESS = 256 * MIB
"""Python, gRPC, and what a process is beside what it is told."""
_TORCH = 768 * MIB
_TEXT = 128 * MIB
"""A tokenizer with its cache of segments."""
_FOLLOWERS = 128 * MIB
_LOOK = 96 * MIB
"""`kvtier health`, which runs in the container that it looks at."""
_C = TypeVar("_C", bound=Root)


def service_of(container: Object) -> str | None:
    """index, store, router, worker or bridge; None for what is not ours."""
    words = argv_of(container, {})
    if not words or words[0] != "kvtier":
        return None
    return words[1] if words[1] in CONFIGS else None


def told(
    workload: Workload, container: Object, folder: Path, fields: Mapping[str, str] = FIELDS
) -> Root:
    """The configuration of a container of ours as it will read it: file, environment, flags.

    ConfigError for whatever its loader does not know.
    """
    variables = workload.environment(container, fields)
    words = argv_of(container, variables)
    kept = {}
    for mount, content in workload.secret_files(container, SECRETS):
        place = folder / mount.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        kept[mount] = str(place)
        for name, data in content.items():
            (place / name).write_bytes(data)
    for path, text in workload.files(container):
        there = folder / path.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        for mount, place_text in kept.items():
            text = text.replace(f"{mount}/", f"{place_text}/")
        there.write_text(text, encoding="utf-8")
        words = [word.replace(path, str(there)) for word in words]
    service = service_of(container)
    assert service is not None
    return load(CONFIGS[service], words[2:], variables).config


def config_of(overlay: Overlay, name: str, kind: type[_C], folder: Path) -> _C:
    """The configuration of the one container of this service."""
    for workload in overlay.workloads:
        for container in workload.containers:
            if service_of(container) == name:
                found = told(workload, container, folder)
                assert isinstance(found, kind)
                return found
    raise AssertionError(f"nobody runs kvtier {name}")


def needs(config: Root, index: IndexConfig) -> int:
    """Bytes that a process may come to with its configuration, every ceiling reached at once."""
    match config:
        case IndexConfig():
            return config.index_bytes_max + _FOLLOWERS + _PROCESS
        case StoreConfig():
            dram = config.dram
            shared = dram.bytes_max + 220 * dram.blocks_max + dram.segments_bytes_max
            moving = config.in_flight_bytes_max + config.staging_bytes_max
            peers = config.peers.bytes_max if config.peers.enabled else 0
            disk = NVME_UNSAVED_BYTES_MAX if config.nvme.enabled else 0
            return shared + moving + peers + disk + _PROCESS
        case RouterConfig():
            # A replica of the index, and the next one while a snapshot is taken.
            texts = _TEXT * len(set(config.texts))
            return 2 * index.index_bytes_max + config.http.bodies_bytes_max + texts + _PROCESS
        case WorkerConfig():
            moving = config.offload.in_flight_bytes_max + config.endpoint.bodies_bytes_max
            return config.cache.kv_memory_bytes + moving + _TEXT + _TORCH
        case BridgeConfig():
            memory, ranks = config.memory, config.engine.ranks
            books = 200 * (memory.residents_max * ranks + memory.keys_max)
            return books + 8 * memory.pending_tokens_max + ENGINE_HELD_BYTES_MAX + _PROCESS
    raise AssertionError(type(config))


def for_looks(container: Object) -> int:
    """Bytes of the probes that are processes of ours, of those that may run at once."""
    words = [
        container.get(kind, {}).get("exec", {}).get("command", ("",))[0]
        for kind in ("readinessProbe", "livenessProbe")
    ]
    return _LOOK * words.count("kvtier")


def in_memory(workload: Workload, container: Object) -> int:
    """Bytes of the volumes in memory that a container mounts: they count as its own."""
    return sum(
        number_of(volume["emptyDir"]["sizeLimit"])
        for mount in container.get("volumeMounts", ())
        if "Memory" in (volume := workload.volume(mount["name"])).get("emptyDir", {}).values()
    )


# vLLM


def flags_of(words: Sequence[str]) -> dict[str, object]:
    """Flags with their values, JSON read; None for a switch."""
    found: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            assert name not in found
            found[name] = (json.loads(text) if text[:1] == "{" else text) if equals else None
    return found


def connector_of(workload: Workload, container: Object) -> Settings:
    """What the connector inside vLLM will read."""
    words = argv_of(container, workload.environment(container, FIELDS))
    transfer: Any = flags_of(words)["--kv-transfer-config"]
    return settings_from(transfer["kv_connector_extra_config"])
