"""The L1 cache on the worker's device: pool, block tables, attention over pages, sampling.

What must not live here: the network, L2, scheduling, HTTP.
"""
