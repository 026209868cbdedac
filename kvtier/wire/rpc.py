"""RPC tables read from the descriptors: handlers for servers, callables for clients.

A table instead of generated stubs, so that a server can be asked for every method it has (the
access policy is tested against this) and a hot path can give bytes that are already serialized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

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


def _handler(rpc: Method, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[rpc.client_streams, rpc.server_streams]
    return make(behaviour, request_deserializer=rpc.parse_request, response_serializer=_serialize)


def service_handler(
    service: ServiceDescriptor, behaviours: Mapping[str, Callable[..., Any]]
) -> grpc.GenericRpcHandler:
    """Handler of a whole service; every method must have a behaviour and no other name may.

    Raises ValueError where the names differ.
    """
    table = methods(service)
    if set(table) != set(behaviours):
        raise ValueError(f"{service.full_name}: {sorted(set(table) ^ set(behaviours))} do not fit")
    handlers = {name: _handler(table[name], behaviour) for name, behaviour in behaviours.items()}
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
