"""Numbers of orders. What must not live here: orders."""

from kvtier_services.worker.l2.port import Ticket


class Tickets:
    """Draws numbers that are never used twice."""

    def __init__(self) -> None:
        self._last = 0

    def draw(self) -> Ticket:
        """The next one; mutates."""
        self._last += 1
        return Ticket(self._last)
