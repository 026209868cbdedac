"""Sans-I/O core: state in, decision out, `now` is an argument.

What must not live here: asyncio, sockets, threads, clocks, randomness, environment,
logging, torch, grpc.
"""
