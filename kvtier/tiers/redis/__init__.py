"""A shared Redis (or Valkey) as a tier: the only importer of `redis`, but for its bench.

- `config`: where the server is (one URL, or Sentinels), and every bound.
- `naming`: block names as keys of fixed length and form.
- `values`: what one value holds, and how it is read straight into a caller's memory.
- `replies`, `connection`, `pool`: the data path, a pipelining connection of our own.
- `control`: everything off the data path, through redis-py with hiredis: Sentinel, SCAN, the
  compare-and-delete of bad copies, the id and the lock.
- `belief`, `holder`: pure: what is thought to be in the server, and what of it is announced.
- `tier`: `RedisTier`, the `BlockTier`. `caretaker`: keeps the belief true, elects the announcer.

Why a data path of our own: asyncio redis-py moves each byte four times between the socket and a
`bytes` object; here a payload is received where the caller wants it and checked there.

What must not live here: promotion, demotion and publishing (the store's).
"""
