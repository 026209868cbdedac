"""The OpenAPI document of the public listener. What must not live here: handlers."""

from typing import Final

from kvtier import __version__

_ERROR_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MODEL: Final[dict[str, object]] = {"type": "string", "minLength": 1}
_TOKENS: Final[dict[str, object]] = {"type": ["integer", "null"], "minimum": 0}
_COMMON: Final[dict[str, object]] = {
    "model": _MODEL,
    "stream": {"type": ["boolean", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
    "max_tokens": _TOKENS,
    "temperature": {"type": ["number", "null"]},
    "cache_salt": {"type": ["string", "null"]},
    "user": {"type": ["string", "null"]},
}
_MESSAGE: Final[dict[str, object]] = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "null"]}},
}


def _schema(required: list[str], properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "required": required, "properties": properties}


_BODIES: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "/v1/chat/completions": (
        "Answer a chat",
        _schema(
            ["model", "messages"],
            {
                **_COMMON,
                "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
                "max_completion_tokens": _TOKENS,
            },
        ),
    ),
    "/v1/completions": (
        "Continue a text or token ids",
        _schema(
            ["model", "prompt"],
            {
                **_COMMON,
                "prompt": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "minItems": 1, "items": {"type": "string"}},
                        {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "integer", "minimum": 0},
                        },
                    ]
                },
            },
        ),
    ),
    "/v1/embeddings": (
        "Embed texts",
        _schema(
            ["model", "input"],
            {
                "model": _MODEL,
                "input": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    ]
                },
            },
        ),
    ),
    "/v1/responses": (
        "Answer, statefully where the worker keeps state",
        _schema(
            ["model"],
            {
                "model": _MODEL,
                "input": {"type": ["string", "array"]},
                "stream": {"type": ["boolean", "null"]},
                "max_output_tokens": _TOKENS,
                "previous_response_id": {"type": ["string", "null"]},
            },
        ),
    ),
}


def document() -> dict[str, object]:
    """OpenAPI 3.1 of what the router itself understands; other `/v1/*` paths are relayed as they
    are."""
    paths: dict[str, object] = {
        path: {"post": _operation(summary, schema)} for path, (summary, schema) in _BODIES.items()
    }
    paths["/v1/models"] = {"get": _page("Names that can be asked for", ("200", "401"))}
    paths["/health"] = {"get": _page("Whether the process lives", ("200",), secured=False)}
    paths["/ready"] = {"get": _page("Whether requests may be sent", ("200", "503"), secured=False)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvtier router", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(summary: str, schema: dict[str, object]) -> dict[str, object]:
    errors = {
        status: _answer(text, {"$ref": "#/components/schemas/Error"})
        for status, text in (
            ("400", "Not a request of the API"),
            ("401", "No or an unknown API key"),
            ("404", "No such model"),
            ("413", "Too large"),
            ("429", "Over quota, or the queue is full"),
            ("502", "The worker failed"),
            ("503", "No worker"),
            ("504", "Took too long"),
        )
    }
    return {
        "summary": summary,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "What the worker answered; a stream where one was asked for",
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **errors,
        },
    }


def _page(summary: str, statuses: tuple[str, ...], *, secured: bool = True) -> dict[str, object]:
    return {
        "summary": summary,
        "security": [{"key": []}, {}] if secured else [],
        "responses": {status: _answer(summary, {"type": "object"}) for status in statuses},
    }


def _answer(text: str, schema: dict[str, object]) -> dict[str, object]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
