"""Leases: hidden at once, forgotten late, and nobody hidden because the index stood still."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier import limits
from kvtier.core.membership import Forget, Hide, LeaseConfig, Leases, LeaseState, Renewal
from kvtier.errors import CallerError, LimitError

LEASE = LeaseConfig(lease_s=3.0, grace_s=60.0, stall_s_max=1.0)


def pass_time(leases: Leases[str], start: float, end: float) -> list[Hide[str] | Forget[str]]:
    """Tick as a healthy caller does: no later than `next_deadline` says."""
    news = leases.tick(start)
    now = start
    while now < end:
        deadline = leases.next_deadline()
        now = end if deadline is None else min(end, max(deadline, now + 0.001))
        news += leases.tick(now)
    return news


def test_a_holder_joins_and_stays_while_it_renews() -> None:
    leases = Leases[str](LEASE)
    assert leases.renew("w", 0.0) is Renewal.JOINED
    for second in range(1, 20):
        assert pass_time(leases, second - 1, second) == []
        assert leases.renew("w", second) is Renewal.RENEWED
    assert leases.state("w") is LeaseState.LIVE


def test_a_holder_is_hidden_the_moment_its_lease_ends() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    assert pass_time(leases, 0.0, 2.999) == []
    assert leases.tick(3.0) == [Hide("w")]
    assert leases.state("w") is LeaseState.HIDDEN
    assert leases.tick(3.0) == []


def test_a_holder_that_stalled_for_two_leases_resumes() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    assert pass_time(leases, 0.0, 6.0) == [Hide("w")]
    assert leases.renew("w", 6.0) is Renewal.RESUMED
    assert leases.state("w") is LeaseState.LIVE
    assert len(leases) == 1


def test_a_hidden_holder_is_forgotten_after_the_grace_period() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    assert pass_time(leases, 0.0, 62.9) == [Hide("w")]
    assert leases.tick(63.0) == [Forget("w")]
    assert leases.state("w") is LeaseState.UNKNOWN
    assert leases.renew("w", 63.0) is Renewal.JOINED


def test_without_grace_a_holder_is_hidden_and_forgotten_in_one_tick() -> None:
    leases = Leases[str](LeaseConfig(lease_s=3.0, grace_s=0.0))
    leases.renew("w", 0.0)
    assert pass_time(leases, 0.0, 3.0) == [Hide("w"), Forget("w")]


def test_an_index_that_was_stopped_hides_nobody_when_it_wakes() -> None:
    leases = Leases[str](LEASE)
    for number in range(100):
        leases.renew(f"w{number}", 0.0)
    assert leases.tick(1000.0) == []
    assert leases.not_counted_s == 999.0
    for number in range(99):
        assert leases.renew(f"w{number}", 1000.5) is Renewal.RENEWED
    assert pass_time(leases, 1000.5, 1002.4) == [Hide("w99")]


def test_a_stop_extends_grace_too() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    pass_time(leases, 0.0, 4.0)
    assert leases.tick(500.0) == []
    assert leases.renew("w", 500.0) is Renewal.RESUMED


def test_time_that_runs_backwards_counts_as_none() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 100.0)
    assert leases.tick(1.0) == []
    assert leases.renew("v", 2.0) is Renewal.JOINED
    assert pass_time(leases, 100.0, 103.0) == [Hide("w"), Hide("v")]


def test_a_holder_that_says_goodbye_is_gone_at_once() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    assert leases.leave("w")
    assert not leases.leave("w")
    assert leases.state("w") is LeaseState.UNKNOWN
    assert leases.next_deadline() is None


def test_a_hidden_holder_can_say_goodbye() -> None:
    leases = Leases[str](LEASE)
    leases.renew("w", 0.0)
    pass_time(leases, 0.0, 3.0)
    assert leases.leave("w")
    assert pass_time(leases, 3.0, 100.0) == []


def test_the_next_deadline_is_never_past_what_a_stop_may_be() -> None:
    leases = Leases[str](LEASE)
    assert leases.next_deadline() is None
    leases.renew("w", 10.0)
    assert leases.next_deadline() == 10.5
    pass_time(leases, 10.0, 12.75)
    assert leases.next_deadline() == 13.0


def test_holders_are_bounded() -> None:
    leases = Leases[int](LEASE)
    for number in range(limits.HOLDERS_COUNT_MAX):
        leases.renew(number, 0.0)
    assert leases.renew(5, 0.1) is Renewal.RENEWED
    with pytest.raises(LimitError, match="holders"):
        leases.renew(limits.HOLDERS_COUNT_MAX, 0.1)


@pytest.mark.parametrize(
    "config",
    [
        {"lease_s": 0.0},
        {"lease_s": limits.LEASE_MS_MAX / 1000 + 1},
        {"stall_s_max": 0.0},
        {"stall_s_max": 1.6},
        {"grace_s": -1.0},
        {"grace_s": float("inf")},
        {"lease_s": float("nan")},
    ],
)
def test_impossible_durations_are_refused(config: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        LeaseConfig(**config)


class LeasesAgainstAScan(RuleBasedStateMachine):
    """The ordered maps against a scan of everybody at every tick."""

    keys = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases[str](LeaseConfig(lease_s=4.0, grace_s=8.0, stall_s_max=2.0))
        self.now = 0.0
        self.counted = 0.0
        self.renewed: dict[str, float] = {}
        self.hidden: set[str] = set()

    @rule(key=keys)
    def renew(self, key: str) -> None:
        known = key in self.renewed
        wanted = Renewal.RENEWED if known else Renewal.JOINED
        if key in self.hidden:
            wanted = Renewal.RESUMED
            self.hidden.remove(key)
        assert self.leases.renew(key, self.now) is wanted
        self.renewed[key] = self.counted

    @rule(key=keys)
    def leave(self, key: str) -> None:
        assert self.leases.leave(key) is (key in self.renewed)
        self.renewed.pop(key, None)
        self.hidden.discard(key)

    @rule(quarters=st.integers(-4, 40))
    def tick(self, quarters: int) -> None:
        later = max(self.now, self.now + quarters / 4)
        self.counted += min(later - self.now, 2.0)
        news = self.leases.tick(later)
        self.now = later
        hide = {
            key
            for key, at in self.renewed.items()
            if self.counted - at >= 4.0 and key not in self.hidden
        }
        self.hidden |= hide
        forget = {key for key in self.hidden if self.counted - self.renewed[key] >= 12.0}
        assert {item.key for item in news if isinstance(item, Hide)} == hide
        assert {item.key for item in news if isinstance(item, Forget)} == forget
        for key in forget:
            del self.renewed[key]
        self.hidden -= forget

    @invariant()
    def states_agree(self) -> None:
        assert len(self.leases) == len(self.renewed)
        for key in "abcd":
            wanted = LeaseState.LIVE if key in self.renewed else LeaseState.UNKNOWN
            wanted = LeaseState.HIDDEN if key in self.hidden else wanted
            assert self.leases.state(key) is wanted


LeasesAgainstAScan.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeasesAgainstAScan = LeasesAgainstAScan.TestCase
