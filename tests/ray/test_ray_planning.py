"""What a fleet wants on which nodes, without Ray."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.batch.reading import plain
from kvtier.errors import ConfigError
from kvtier.local import settings as local_settings
from kvtier.local.plan import Kind
from kvtier.local.settings import load_named
from kvtier.ray.datasets import dataset_rows
from kvtier.ray.keeper import CLASSES
from kvtier.ray.planning import Node, Serving, node_names, wanted_of
from kvtier.ray.settings import Fleet, document_of, read_fleet
from tests.harness.processes import REPOSITORY
from tests.harness.toml_text import toml_text


def node(node_id: str, *, is_head: bool = False, ip: str = "127.0.0.1", **more: float) -> Node:
    return Node(node_id, f"name {node_id}", ip, is_head, {"CPU": 4.0, **more})


def fleet(tmp_path: Path, *flags: str, **tables: Any) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(toml_text({"ray": {"model": "fake"}, **tables}))
    return read_fleet(["--config", str(path), *flags])


SERVES = {
    "index": Serving("127.0.0.1:7710"),
    "store-name-a": Serving("127.0.0.1:7720", "/run/a.sock"),
    "store-name-b": Serving("127.0.0.1:7721", "/run/b.sock"),
}
NODES = [node("a", is_head=True), node("b", GPU=2.0)]


def test_services_are_wanted_one_after_another(tmp_path: Path) -> None:
    asked = fleet(tmp_path)
    names = [one.name for one in wanted_of(asked, NODES, {})]
    assert names == ["index"]
    names = [one.name for one in wanted_of(asked, NODES, {"index": SERVES["index"]})]
    assert names == ["index", "store-name-a", "store-name-b", "router"]
    wanted = {one.name: one for one in wanted_of(asked, NODES, SERVES)}
    assert set(wanted) == {
        "index", "store-name-a", "store-name-b", "worker-name-a-1", "worker-name-b-1", "router",
    }  # fmt: skip
    worker = wanted["worker-name-b-1"]
    assert (worker.node_id, worker.kind) == ("b", Kind.WORKER)
    assert worker.table["store"] == {"targets": ["unix:/run/b.sock"]}
    assert worker.table["index"] == {"targets": ["127.0.0.1:7710"]}
    assert worker.table["node"] == wanted["store-name-b"].table["node"] == "name-b"


def test_workers_go_where_their_resources_are(tmp_path: Path) -> None:
    asked = fleet(tmp_path, "--worker-gpus", "1", "--workers-per-node", "2")
    workers = [one for one in wanted_of(asked, NODES, SERVES) if one.kind is Kind.WORKER]
    assert [one.name for one in workers] == ["worker-name-b-1", "worker-name-b-2"]
    assert all(one.gpus == 1.0 for one in workers)
    named = fleet(tmp_path, "--worker-resource", "kv")
    assert not [one for one in wanted_of(named, NODES, SERVES) if one.kind is Kind.WORKER]
    having = [node("a", is_head=True, kv=1.0)]
    [worker] = [one for one in wanted_of(named, having, SERVES) if one.kind is Kind.WORKER]
    assert worker.resource == "kv"


def test_sections_of_the_file_win_and_a_change_of_them_changes_the_digest(tmp_path: Path) -> None:
    plain_one = wanted_of(fleet(tmp_path), NODES, SERVES)
    again = wanted_of(fleet(tmp_path), list(reversed(NODES)), SERVES)
    assert [one.digest for one in plain_one] == [one.digest for one in again]
    changed = wanted_of(fleet(tmp_path, store={"dram": {"bytes_max": 1 << 26}}), NODES, SERVES)
    differ = {
        one.name
        for one, other in zip(plain_one, changed, strict=True)
        if one.digest != other.digest
    }
    assert differ == {"store-name-a", "store-name-b"}
    moved = wanted_of(fleet(tmp_path), NODES, {**SERVES, "index": Serving("127.0.0.1:1")})
    assert [one.digest for one in moved[1:]] != [one.digest for one in plain_one[1:]]


def test_off_loopback_nothing_is_open_unless_it_is_said(tmp_path: Path) -> None:
    away = [node("a", is_head=True, ip="192.0.2.7")]
    [closed] = wanted_of(fleet(tmp_path), away, {})
    assert "listen" not in closed.table
    [opened] = wanted_of(fleet(tmp_path, "--insecure"), away, {})
    assert opened.table["listen"] == {"insecure": True}
    [near] = wanted_of(fleet(tmp_path, "--insecure"), NODES, {})
    assert "listen" not in near.table


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    same = [Node(f"{n}" * 12, "host", "127.0.0.1", False, {}) for n in range(2)]
    assert node_names(same) == {"0" * 12: "host-00000000", "1" * 12: "host-11111111"}
    assert node_names([node("x/../y")]) == {"x/../y": "name-x-..-y"}


def test_a_wrong_fleet_is_refused_and_its_text_can_be_sent_to_another_machine(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        fleet(tmp_path, ray={"modell": "fake"})
    with pytest.raises(ConfigError, match="stor: want tables"):
        fleet(tmp_path, stor={})
    with pytest.raises(ConfigError, match="workers_per_node"):
        fleet(tmp_path, "--workers-per-node", "0")
    asked = fleet(tmp_path, "--routers", "2")
    text, flags = document_of(["--routers", "2", "--config", str(tmp_path / "fleet.toml")])
    copy = tmp_path / "copy.toml"
    copy.write_text(text)
    assert read_fleet([*flags, "--config", str(copy)]).config == asked.config


def test_rows_of_a_data_set_have_no_types_of_numpy() -> None:
    class Made:
        def iter_rows(self) -> list[dict[str, object]]:
            message = {"role": "user", "content": "hi", "name": None}
            return [
                {"prompt": np.array([1, 2, 3]), "max_tokens": np.int64(4), "seed": None},
                {"messages": np.array([message], dtype=object), "custom_id": "b"},
            ]

    rows = list(dataset_rows(Made(), {}))
    assert rows[0].body == {"prompt": [1, 2, 3], "max_tokens": 4}
    assert rows[1].body == {"messages": [{"role": "user", "content": "hi"}]}
    assert type(plain({"n": np.float32(0.5)})["n"]) is float
    assert plain({"n": np.float64("nan"), "m": [1.5, None], "o": {"p": None}}) == {
        "m": [1.5, None],
        "o": {},
    }


@pytest.mark.parametrize("name", ["fleet.toml", "laptop.toml"])
def test_the_files_to_start_from_are_read_by_every_service(tmp_path: Path, name: str) -> None:
    for secret in ("cluster.secret", "router.token"):
        (tmp_path / secret).write_text("0123456789abcdef")
    text = (REPOSITORY / "deploy" / "ray" / name).read_text()
    file = tmp_path / name
    file.write_text(text.replace("/etc/kvtier", str(tmp_path)))
    nodes = [Node("a", "a", "192.0.2.7", True, {"CPU": 64.0, "GPU": 8.0})]
    serving = {"index": Serving("192.0.2.7:7710"), "store-a": Serving("192.0.2.7:7720", "/s")}
    wanted = wanted_of(read_fleet(["--config", str(file)]), nodes, serving)
    assert {one.kind for one in wanted} == {Kind.INDEX, Kind.STORE, Kind.WORKER, Kind.ROUTER}
    for one in wanted:
        path = tmp_path / f"{one.name}.toml"
        path.write_text(local_settings.toml_text(one.table))
        load_named(CLASSES[one.kind], path, one.name)
