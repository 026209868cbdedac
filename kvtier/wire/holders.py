"""From the wire's Holder and Load to the core's views of them, and a Load back.

What must not live here: which of them to choose (kvtier.core.scoring).
"""

from kvtier.core.fleet import HolderInfo
from kvtier.core.workers import HolderView, Load
from kvtier.types import HolderId
from kvtier.wire import convert
from kvtier.wire import messages as pb


def load_to(load: Load) -> pb.Load:
    return pb.Load(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running_tokens=load.running_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


def load_from(message: pb.Load) -> Load:
    return Load(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        running_tokens=message.running_tokens,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
    )


def view_from(message: pb.Holder, info: HolderInfo, now: float) -> HolderView:
    """A holder as received at `now`; `info` is what its Hello says (`convert.info_from`)."""
    return HolderView(
        holder=HolderId(message.holder),
        info=info,
        trust=convert.trust_from(message.trust),
        degraded_reason=message.degraded_reason,
        is_hidden=message.hidden,
        load=load_from(message.load),
        reserved_prefill_tokens=message.reserved_prefill_tokens,
        reserved_requests=message.reserved_requests,
        heard_at=now - message.age_ms / 1000,
    )
