"""kvtier: one KV cache for a whole LLM fleet.

Importing this package pulls in neither torch, grpc nor redis; the extras bring them.
"""

from kvtier.errors import KvtierError

__all__ = ["KvtierError", "__version__"]

__version__ = "0.2.0"
