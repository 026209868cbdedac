"""`kvtier size`: the arithmetic of a fleet on the command line."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.sizing.demand import GIB, Demand, Terms, demand
from kvtier.sizing.kv_bytes import KNOWN, ModelShape, shape_of
from kvtier.sizing.unit_costs import measured

_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("tensor_parallel", int, "GPUs of a worker"),
    ("gpus_per_node", int, "GPUs of a node, with one store"),
    ("gpu_gib", float, "memory of a GPU"),
    ("gpu_share", float, "share of it for weights and KV"),
    ("kv_gib", float, "KV of a worker over its GPUs; by default what weights of 2 bytes leave"),
    ("requests_per_s", float, "requests a second of one worker"),
    ("prompt_tokens", float, "mean length of prompts"),
    ("output_tokens", float, "mean length of answers"),
    ("hit", float, "share of prompt tokens found in some tier"),
    ("l2", float, "share of the hits that a store serves, not L1"),
    ("remote", float, "share of what stores serve that comes from another node"),
    ("cold", float, "share of what stores serve that is read from a disk first"),
    ("dram_gib", float, "DRAM of a node's store"),
    ("nvme_gib", float, "disk of a node's store; 0 for none"),
    ("save", float, "share of what is computed that is written to the store"),
    ("disk", float, "share of what goes to DRAM that goes on to disk"),
    ("nic_gbit", float, "network of a node"),
    ("bus_bytes_per_s", float, "between a GPU and its host"),
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kvtier size", description="What a fleet needs, from measured costs a unit."
    )
    made.add_argument("--gpus", type=int, required=True)
    known = ", ".join(KNOWN)
    made.add_argument("--model", required=True, help=f"a config.json or its folder, or {known}")
    made.add_argument("--block-tokens", type=int, default=16, help="default 16")
    made.add_argument(
        "--kv-dtype", default="bfloat16", choices=[str(dtype) for dtype in KvDtype],
        help="default bfloat16",
    )  # fmt: skip
    fields = {field.name: field.default for field in dataclasses.fields(Terms)}
    for name, kind, text in _OPTIONS:
        default = fields[name]
        shown = text if default is None else f"{text}; default {default:g}"
        made.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=shown)
    made.add_argument(
        "--measured", type=Path, action="append", default=[], metavar="FILE",
        help="what `kvtier bench index|index-service|router|store --json` printed on your machine",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="one object in place of the table")
    return made


def command(argv: list[str]) -> int:
    """`kvtier size ...`; 2 for terms that make no fleet."""
    told = parser().parse_args(argv)
    try:
        terms = Terms(
            gpus=told.gpus,
            block_tokens=told.block_tokens,
            dtype=KvDtype(told.kv_dtype),
            **{name: getattr(told, name) for name, _, _ in _OPTIONS},
        )
        model = shape_of(told.model)
        needed = demand(model, terms, measured(told.measured))
    except CallerError as error:
        sys.stderr.write(f"kvtier size: {error}\n")
        return 2
    if told.json:
        text = json.dumps({"model": dataclasses.asdict(model), **as_json(needed)})
    else:
        text = "\n".join(table(model, terms, needed))
    sys.stdout.write(text + "\n")
    return 0


def as_json(needed: Demand) -> dict[str, object]:
    uses = [dataclasses.asdict(use) | {"share": use.share} for use in needed.uses]
    return dataclasses.asdict(needed) | {"uses": uses}


def table(model: ModelShape, terms: Terms, needed: Demand) -> Sequence[str]:
    """For people: what is needed, then what is full first."""
    nodes = f"{needed.nodes:,} nodes"
    lines = [
        f"{model.name}: {model.attention}, KV of a token {model.formula(terms.dtype)}; "
        f"a block of {terms.block_tokens} is {_bytes(needed.block_bytes)}",
    ]
    if model.windowed_layers:
        lines.append(
            f"  and up to {_bytes(model.window_bytes(terms.dtype))} a sequence in "
            f"{model.windowed_layers} layers with a window of {model.window:,}"
        )
    rows = [
        ("fleet", f"{terms.gpus:,} GPUs, {needed.workers:,} workers, {nodes}"),
        ("L1", f"{needed.l1_blocks:,} blocks a worker"),
        ("L2", f"{needed.dram_blocks:,} blocks of DRAM and {needed.nvme_blocks:,} of disk a node"),
        ("events", f"{needed.events_per_s:,.0f} blocks/s appear or go"),
        ("index", f"{needed.index_replicas} replicas of {_bytes(needed.index_bytes)} for "
            f"{needed.index_blocks:,} blocks, {needed.index_cpu:.2f} cores each, "
            f"{_bytes(needed.event_bytes_per_s)}/s to the routers"),
        ("router", f"{needed.router_processes} processes for {needed.requests_per_s:,.0f} "
            f"requests/s, {needed.router_cpu:.1f} cores in all, "
            f"{_bytes(needed.index_bytes)} each"),
        ("store", f"a node reads {_bytes(needed.store_read_bytes_per_s)}/s and writes "
            f"{_bytes(needed.store_write_bytes_per_s)}/s, "
            f"{_bytes(needed.nvme_bytes_a_day)} a day to disk; "
            f"{_bytes(needed.nvme_read_bytes_per_s)}/s come from disk"),
        ("network", f"a node gets {_bytes(needed.remote_bytes_per_s)}/s from other nodes"),
    ]  # fmt: skip
    lines += [f"{name:8} {text}" for name, text in rows]
    lines.append("full first:")
    lines += [
        f"  {use.share:6.1%}  {use.resource} ({_amount(use.used, use.unit)} of "
        f"{_amount(use.capacity, use.unit)})"
        for use in needed.uses
    ]
    if not needed.router_processes:
        lines.append(
            "one core cannot follow these events: cut the fleet in parts with an index each"
        )
    return lines


def _amount(value: float, unit: str) -> str:
    return f"{_bytes(value)}/s" if unit == "B/s" else f"{value:.2f} {unit}"


def _bytes(count: float) -> str:
    for unit, size in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
