"""What a decoder must be told of an engine, because its bytes do not say it."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.core.checks import require_integer
from kvtier.limits import BLOCK_TOKENS_MAX, TOKEN_ID_MAX


class Dialect(StrEnum):
    """Whose events they are."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class HiddenSalts(StrEnum):
    """What to think of blocks whose event cannot carry a salt, of engines too old for it."""

    REFUSE = "refuse"
    """They may be of a salted request: not indexed, lest one tenant's blocks show for another."""
    ASSUME_NONE = "assume_none"
    """The operator vouches that this engine gets no salted requests."""


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """`window_tokens` chooses one of TensorRT-LLM's window sizes (None: there is one only);
    `has_adapters` says that it serves adapters, which some of its events do not name."""

    dialect: Dialect
    block_tokens: int
    hidden_salts: HiddenSalts = HiddenSalts.REFUSE
    has_adapters: bool = False
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        require_integer("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        if self.window_tokens is not None:
            require_integer("window_tokens", self.window_tokens, 1, TOKEN_ID_MAX)
