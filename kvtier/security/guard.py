"""The server's gate: every call is authenticated, then checked against the policy, then served.

Where a token decides, it does so before a single message of the call is read. What a caller is told
is one of two constant sentences; why is only counted.

What must not live here: where identities come from (`tokens`, `tls`), what a role may do (`roles`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from kvtier.errors import ForbiddenError, UnauthenticatedError
from kvtier.security import tls
from kvtier.security.roles import ANYONE, PUBLIC, Policy, Principal
from kvtier.security.tokens import Denial, TokenBook

AUTHORIZATION: Final = "authorization"
_SCHEME: Final = "bearer "
_SENTENCES: Final = {
    UnauthenticatedError: "no valid credentials",
    ForbiddenError: "not allowed",
}
_FORBIDDEN: Final = frozenset({Denial.ROLE, Denial.NO_POLICY})

_CALLER: ContextVar[Principal] = ContextVar("kvtier_caller")

# Quoted: only gRPC's stubs know that these classes are generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Admit: TypeAlias = "Callable[[Context], Awaitable[None]]"


def caller() -> Principal:
    """Who makes the call that is being served. UnauthenticatedError outside of a guarded call."""
    try:
        return _CALLER.get()
    except LookupError:
        raise UnauthenticatedError("no authenticated call is being served") from None


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor of one server; must be its first. Mutates only its counters.

    With neither a token book nor certificates it admits every caller as `ANYONE`, but still only to
    methods of the policy. Where both are asked for, one of them is enough, and if a caller shows
    both, they must name the same principal.
    """

    def __init__(self, policy: Policy, book: TokenBook | None, *, certificates: bool) -> None:
        self._policy = policy
        self._book = book
        self._certificates = certificates
        self.denials: dict[Denial, int] = dict.fromkeys(Denial, 0)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        if method in PUBLIC:
            return await continuation(handler_call_details)
        claim = self._claim(handler_call_details.invocation_metadata)
        if claim is None and not self._certificates:
            claim = Denial.MISSING
        if isinstance(claim, Denial):
            return self._refusal(claim)
        if method not in self._policy.methods:
            return self._refusal(Denial.NO_POLICY)
        if claim is not None and not self._policy.allows(claim, method):
            return self._refusal(Denial.ROLE)
        handler = await continuation(handler_call_details)
        if handler is None or not _is_asynchronous(handler):
            return None  # UNIMPLEMENTED: gRPC's own base classes leave synchronous methods behind

        async def admit(context: Context) -> None:
            principal = self._principal(claim, context)
            if isinstance(principal, Principal) and not self._policy.allows(principal, method):
                principal = Denial.ROLE
            if isinstance(principal, Denial):
                await self._abort(context, principal)
            else:
                _CALLER.set(principal)

        return _guarded(handler, admit)

    def _claim(self, metadata: Iterable[tuple[str, str | bytes]]) -> Principal | Denial | None:
        """What the call's token says; None where it presents none."""
        if self._book is None:
            return None if self._certificates else ANYONE
        values = [value for key, value in metadata if key == AUTHORIZATION]
        if not values:
            return None
        value = values[0]
        if len(values) > 1 or not isinstance(value, str):
            return Denial.MALFORMED
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return Denial.MALFORMED
        return self._book.find(value[len(_SCHEME) :])

    def _principal(self, claim: Principal | None, context: Context) -> Principal | Denial:
        """Token and certificate together. A certificate was verified when the connection began."""
        if not self._certificates:
            return claim if claim is not None else Denial.MISSING
        certified = tls.identity(context.auth_context())
        if claim is None:
            return certified if certified is not None else Denial.MISSING
        if certified is not None and (certified.name, certified.role) != (claim.name, claim.role):
            return Denial.CONTRADICTING
        return claim

    def _refusal(self, denial: Denial) -> Handler:
        """A handler that ends the call without reading any of it, whatever its kind."""

        async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
            await self._abort(context, denial)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _abort(self, context: Context, denial: Denial) -> None:
        """Count and end the call; raises grpc's own abort exception."""
        self.denials[denial] += 1
        error = ForbiddenError if denial in _FORBIDDEN else UnauthenticatedError
        await context.abort(grpc.StatusCode[error.grpc_status], _SENTENCES[error])


def _guarded(handler: Handler, admit: Admit) -> Handler:
    """The same handler, which is asynchronous, behind `admit`."""
    inner = _behaviour(handler)
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[handler.request_streaming, handler.response_streaming]
    guard = _guarded_generator if inspect.isasyncgenfunction(inner) else _guarded_coroutine
    behaviour = guard(inner, admit)
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _is_asynchronous(handler: Handler) -> bool:
    inner = _behaviour(handler)
    return inspect.isasyncgenfunction(inner) or inspect.iscoroutinefunction(inner)


def _behaviour(handler: Handler) -> Callable[..., Any]:
    found = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    if found is None:
        raise TypeError("a handler without behaviour")
    return found


def _guarded_coroutine(inner: Callable[..., Any], admit: Admit) -> Callable[..., Any]:
    async def behaviour(request: object, context: Context) -> object:
        await admit(context)
        answer: object = await inner(request, context)
        return answer

    return behaviour


def _guarded_generator(inner: Callable[..., Any], admit: Admit) -> Callable[..., Any]:
    async def behaviour(request: object, context: Context) -> AsyncIterator[object]:
        await admit(context)
        # Closed here, not by the garbage collector: a cancelled call lets go at once.
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for answer in answers:
                yield answer

    return behaviour
