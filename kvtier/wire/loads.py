"""Between the wire's Load and the core's."""

from kvtier.core.workers import Load
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
