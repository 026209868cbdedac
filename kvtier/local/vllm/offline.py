"""vLLM inside a Python program (`vllm.LLM`, Ray Data): what it is given to share its blocks.

The same as `kvtier vllm flags`, as arguments of its engine. What must not live here: flags.
"""

from typing import Final

from kvtier.local.vllm.flags import BLOCK_TOKENS, DETAILS, EVENTS, Wanted, needed
from kvtier.sections import parse_address

_OF_SERVERS: Final = frozenset({DETAILS, EVENTS})
"""Answers over HTTP, and the bridge: an engine in a program has neither."""


def engine_kwargs(
    store: str, block_tokens: int = BLOCK_TOKENS, model_id: str = "", revision: str = ""
) -> dict[str, object]:
    """Arguments of `vllm.LLM`, and `engine_kwargs` of Ray Data's vLLM processor, that make the
    engine load from a node's store and save to it. Pure; a new dictionary for each call.

    `store` is unix:/path of that store on every node, or host:port. CallerError for what is no
    address.
    """
    parse_address(store)
    wanted = Wanted(
        store=store,
        events="",
        replay="",
        block_tokens=block_tokens,
        model_id=model_id,
        revision=revision,
    )
    found: dict[str, object] = {}
    for flag in needed(wanted):
        if flag.name in _OF_SERVERS:
            continue
        value: object = flag.value
        if value is None:
            value = True
        elif isinstance(value, str) and value.isdigit():
            value = int(value)
        found[flag.name.removeprefix("--").replace("-", "_")] = value
    return found
