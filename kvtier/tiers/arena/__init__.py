"""The DRAM tier in shared memory: one process writes, every process of its node reads in place.

`tier` is the store's side, `server` lets other processes in, `client` is theirs; `directory`
describes the layout, `memory` the sealed memory, `slabs` and `holdings` who has which slot.
What must not live here: gRPC; the store's service speaks it and calls the server's methods.
"""
