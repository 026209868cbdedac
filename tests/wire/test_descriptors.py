"""The protos may only grow: held against the last committed set in proto/baseline.json."""

import json
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvtier.wire._pb import events_pb2, identity_pb2, index_pb2, store_pb2

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "proto" / "baseline.json"
FILES = (
    identity_pb2.DESCRIPTOR,
    events_pb2.DESCRIPTOR,
    index_pb2.DESCRIPTOR,
    store_pb2.DESCRIPTOR,
)

Described = dict[str, dict[str, str]]


def field_shape(field: FieldDescriptor) -> str:
    label = "repeated" if field.is_repeated else "singular"
    of_type = field.message_type or field.enum_type
    one_of = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
    return (
        f"{field.number} {label} {field.type}{' ' + of_type.full_name if of_type else ''}{one_of}"
    )


def described() -> Described:
    """Every message, enum and method of the protos, as plain text."""
    result: Described = {}
    for file in FILES:
        pending = list(file.message_types_by_name.values())
        enums = list(file.enum_types_by_name.values())
        while pending:
            message = pending.pop()
            pending.extend(message.nested_types)
            enums.extend(message.enum_types)
            result[message.full_name] = {field.name: field_shape(field) for field in message.fields}
        for enum in enums:
            result[enum.full_name] = {value.name: str(value.number) for value in enum.values}
        for service in file.services_by_name.values():
            result[service.full_name] = {
                method.name: " ".join(
                    [
                        "stream" if method.client_streaming else "one",
                        method.input_type.full_name,
                        "stream" if method.server_streaming else "one",
                        method.output_type.full_name,
                    ]
                )
                for method in service.methods
            }
    return result


def breaks(old: Described, new: Described) -> list[str]:
    """What a reader of the old protos could no longer understand."""
    found = []
    for name, members in old.items():
        for member, shape in members.items():
            now = new.get(name, {}).get(member)
            if now != shape:
                found.append(f"{name}.{member}: was {shape!r}, is {now!r}")
    return found


def test_protos_only_grow_since_the_committed_baseline() -> None:
    baseline: Described = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert breaks(baseline, described()) == []


def test_baseline_knows_every_member_so_that_the_next_change_is_held_against_it() -> None:
    baseline: Described = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert breaks(described(), baseline) == [], "run `make proto`"


@pytest.mark.parametrize("change", ["type", "number", "removed", "method"])
def test_a_breaking_change_is_found(change: str) -> None:
    new = described()
    batch = dict(new["kvtier.v1.Batch"])
    if change == "type":
        batch["seq"] = batch["seq"].replace(" 4", " 5")
    elif change == "number":
        batch["seq"] = "9" + batch["seq"][1:]
    elif change == "removed":
        del batch["seq"]
    else:
        del new["kvtier.v1.Index"]
    new["kvtier.v1.Batch"] = batch
    assert breaks(described(), new)
