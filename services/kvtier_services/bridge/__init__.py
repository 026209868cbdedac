"""Sidecar of a foreign engine: its KV events become KVEvents with an epoch, snapshots and recovery.

    engine ── ZMQ ──▶ sockets ─┐
                               ├▶ rank: sequence, holdings, slots ──▶ publisher ──▶ every index
    connector ─ Unix ──▶ feed ─┘         └──▶ memory (disk)

What must not live here: decisions (`kvtier.core.engine_*`), wire formats (`kvtier.engines.events`).
"""
