"""What grpc.aio alone costs: a Publish that reads messages, throws them away and acknowledges.

Server options and the pace of acknowledgements are those of the index service; messages stay the
bytes that they are. `python -m kvtier.bench.index_service_floor` serves until it is ended.
"""

import asyncio
import contextlib
import sys
from typing import Any

import grpc
import grpc.aio

from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport
from kvtier_services.index.publishing import ACK_DELAY_S

PREAMBLE = 2
"""Hello and an empty snapshot: answered at once, not counted as batches."""


async def publish(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    answer = pb.PublishResponse(ack=pb.Ack(seq=0)).SerializeToString()
    for _number in range(PREAMBLE):
        await context.read()
        await context.write(answer)
    arrived = asyncio.Event()
    count = 0

    async def acknowledge() -> None:
        while True:
            await arrived.wait()
            await asyncio.sleep(ACK_DELAY_S)
            arrived.clear()
            await context.write(pb.PublishResponse(ack=pb.Ack(seq=count)).SerializeToString())

    acks = asyncio.create_task(acknowledge())
    try:
        while await context.read() is not grpc.aio.EOF:
            count += 1
            arrived.set()
    finally:
        acks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await acks


async def serve() -> None:
    server = transport.new_server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(publish)
    service = grpc.method_handlers_generic_handler(rpc.INDEX.full_name, {"Publish": handler})
    server.add_generic_rpc_handlers((service,))
    port = transport.open_port(server, "127.0.0.1:0", None)
    await server.start()
    sys.stderr.write(f"serving port={port}\n")
    sys.stderr.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve())
