"""The L1 cache on the worker's device: pool, block tables, attention over pages, sampling.

`geometry` and `blocks` need no torch. What must not live here: model code (kvtier.engines), the
network, L2, scheduling, HTTP.
"""
