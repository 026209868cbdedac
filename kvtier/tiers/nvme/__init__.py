"""The NVMe tier: frames in append-only segment files, and RocksDB for the index on disk.

Import `kvtier.tiers.nvme.tier`. From below: `layout` (sizes, packed names and places), `lanes`
(threads, and who may touch a caller's memory), `segments` (files of frames), `catalog` (RocksDB),
`home` (the directory, its lock and its generations), `ledger` (what lies where, what goes next),
`archive` (all of that together), `reading`, `writing`, `saving`, and `tier`, the port.
What must not live here: other tiers, and when to write (the planner's).
"""
