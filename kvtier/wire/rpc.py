"""RPC tables read from the descriptors: handlers for servers, callables for clients.

A table instead of generated stubs, so that a server can be asked for every method it has (the
access policy is tested against this) and a hot path can give bytes that are already serialized.
What must not live here: deadlines, retries, credentials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Mapping
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from kvtier.errors import CallerError
from kvtier.wire._pb import index_pb2, store_pb2

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]

INDEX: ServiceDescriptor = index_pb2.DESCRIPTOR.services_by_name["Index"]
STORE: ServiceDescriptor = store_pb2.DESCRIPTOR.services_by_name["Store"]
SERVICES: tuple[ServiceDescriptor, ...] = (INDEX, STORE)
"""Every service of ours, for whoever must enumerate all methods."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One RPC of a service, with the codecs of its messages."""

    path: str
    client_streams: bool
    server_streams: bool
    parse_request: Deserializer
    parse_response: Deserializer


def _parser(method_type: Any) -> Deserializer:
    message = message_factory.GetMessageClass(method_type)
    return cast(Deserializer, message.FromString)


def _serialize(message: Any) -> bytes:
    """Bytes pass through: a message that goes to many receivers is serialized once."""
    return message if isinstance(message, bytes) else cast(bytes, message.SerializeToString())


def method(descriptor: MethodDescriptor) -> Method:
    service = descriptor.containing_service
    return Method(
        path=f"/{service.full_name}/{descriptor.name}",
        client_streams=descriptor.client_streaming,
        server_streams=descriptor.server_streaming,
        parse_request=_parser(descriptor.input_type),
        parse_response=_parser(descriptor.output_type),
    )


def methods(service: ServiceDescriptor) -> dict[str, Method]:
    """Every RPC of the service by its short name."""
    return {descriptor.name: method(descriptor) for descriptor in service.methods}


MALFORMED: Final = object()
"""What a server reads where the bytes are no message; grpc would log each as a crash of ours."""
_MALFORMED_TEXT: Final = "the bytes are no message of this method"


def well_formed(request: Any) -> Any:
    """A request as it was read from a stream; CallerError where the bytes were no message."""
    if request is MALFORMED:
        raise CallerError(_MALFORMED_TEXT)
    return request


def parsed(rpc: Method, data: bytes) -> Any:
    """The request in bytes that were read as they came; CallerError where they are none."""
    try:
        return rpc.parse_request(data)
    except DecodeError as error:
        raise CallerError(_MALFORMED_TEXT) from error


def _tolerant(parse: Deserializer) -> Deserializer:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return MALFORMED

    return parse_or_mark


class _WellFormed:
    """A stream of requests that raises CallerError where the bytes were no message."""

    def __init__(self, requests: AsyncIterable[Any]) -> None:
        self._requests = requests
        self._iterator: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _WellFormed:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # not before: who reads from the context must not touch it
            self._iterator = aiter(self._requests)
        return well_formed(await anext(self._iterator))


def _checked(behaviour: Callable[..., Any], *, client_streams: bool) -> Callable[..., Any]:
    """The behaviour of a method, which is given messages only."""

    async def check(request: Any, context: Any) -> Any:
        if client_streams:
            return _WellFormed(request)
        if request is MALFORMED:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _MALFORMED_TEXT)
        return request

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        checked = await check(request, context)
        async with contextlib.aclosing(behaviour(checked, context)) as messages:
            async for message in messages:
                yield message

    async def answer(request: Any, context: Any) -> Any:
        return await behaviour(await check(request, context), context)

    return answers if inspect.isasyncgenfunction(behaviour) else answer


def _handler(
    rpc: Method, behaviour: Callable[..., Any], parse_request: Deserializer | None
) -> grpc.RpcMethodHandler[Any, Any]:
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[rpc.client_streams, rpc.server_streams]
    return make(
        _checked(behaviour, client_streams=rpc.client_streams),
        request_deserializer=parse_request,
        response_serializer=_serialize,
    )


def service_handler(
    service: ServiceDescriptor,
    behaviours: Mapping[str, Callable[..., Any]],
    raw: Collection[str] = (),
) -> grpc.GenericRpcHandler:
    """Handler of a whole service; every method must have a behaviour and no other name may.

    Behaviours are coroutine functions or asynchronous generators. Where the bytes of a request are
    no message, iterating raises CallerError; who reads from the context passes it through
    `well_formed`. Methods named in `raw` read bytes from the context and give them to `parsed`.
    Raises ValueError where the names differ.
    """
    table = methods(service)
    if set(table) != set(behaviours):
        raise ValueError(f"{service.full_name}: {sorted(set(table) ^ set(behaviours))} do not fit")
    handlers = {
        name: _handler(
            table[name], behaviour, None if name in raw else _tolerant(table[name].parse_request)
        )
        for name, behaviour in behaviours.items()
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def call(channel: grpc.aio.Channel, service: ServiceDescriptor, name: str) -> Callable[..., Any]:
    """Callable of one RPC on an asyncio channel, as grpc.aio's stubs give it."""
    rpc = methods(service)[name]
    makers: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    make = makers[rpc.client_streams, rpc.server_streams]
    return cast(
        "Callable[..., Any]",
        make(rpc.path, request_serializer=_serialize, response_deserializer=rpc.parse_response),
    )
