"""Whether a request is split: by cost, by what is left to compute, by who reaches what."""

from dataclasses import replace

import pytest

from kvtier.core.workers import Load
from kvtier.errors import ConfigError
from kvtier.types import Role
from kvtier_router.routing import RouteAsk
from kvtier_router.routing.splitting import SplitMode, SplitPlan, SplitPolicy, SplitReason, Splitter
from kvtier_router.routing.values import FailureKind, Knowledge, PromptKind, Usage
from tests.router.routing.bench import PROMPT, Bench, chain, name
from tests.support.virtual_fleet import BLOCK_TOKENS, info_of, view_of, words

ASK = RouteAsk("model", PROMPT)


class Roles:
    """A fleet of workers with roles and stores, and a splitter over it."""

    def __init__(
        self, *roles: Role, mode: SplitMode = SplitMode.AUTO, one_store: bool = True
    ) -> None:
        self.bench = Bench(0)
        self.one_store = one_store
        for number, role in enumerate(roles):
            self.tell(number, role)
        self.splitter = Splitter(self.bench.router, SplitPolicy(mode), self.bench.clock)

    def tell(self, number: int, role: Role, *, store: str | None = None, decoding: int = 0) -> None:
        named = ("store" if self.one_store else f"store{number}") if store is None else store
        info = replace(info_of(number), role=role, store=named)
        load = Load(running_requests=decoding, total_blocks=1000, free_blocks=1000)
        self.bench.replica.tell(view_of(number, info, heard_at=100.0, load=load))

    def plan(self, ask: RouteAsk = ASK) -> SplitPlan:
        plan = self.splitter.plan(ask)
        assert plan is not None
        return plan


def test_a_fleet_without_roles_and_one_that_never_splits_are_not_even_asked() -> None:
    assert Roles(Role.BOTH, Role.BOTH, mode=SplitMode.ALWAYS).splitter.plan(ASK) is None
    assert Roles(Role.PREFILL, Role.DECODE, mode=SplitMode.NEVER).splitter.plan(ASK) is None


def test_an_idle_decode_worker_computes_a_prompt_itself_and_a_busy_one_is_spared() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE)
    idle = fleet.plan()
    assert (idle.is_split, idle.reason) == (False, SplitReason.CHEAPER)
    fleet.tell(1, Role.DECODE, decoding=20)
    busy = fleet.plan()
    assert (busy.is_split, busy.reason) == (True, SplitReason.COST)
    assert (busy.prefill, busy.decode) == (name(0), name(1))
    assert busy.split_s is not None
    assert busy.whole_s is not None
    assert busy.split_s < busy.whole_s


def test_a_queue_of_prefills_speaks_against_splitting() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE)
    fleet.tell(1, Role.DECODE, decoding=2)
    assert fleet.plan().is_split
    for number in range(40):
        fleet.bench.route(words(f"other{number}", 4000), stage=Role.PREFILL)
    assert fleet.plan().reason is SplitReason.CHEAPER


@pytest.mark.parametrize("mode", [SplitMode.AUTO, SplitMode.ALWAYS])
def test_what_the_decode_worker_holds_is_not_computed_elsewhere(mode: SplitMode) -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, mode=mode)
    fleet.tell(1, Role.DECODE, decoding=20)
    fleet.bench.replica.store(1, chain(PROMPT))
    assert fleet.plan().reason is SplitReason.SHORT


def test_short_prompts_are_not_split_and_always_knows_no_minimum_but_a_block() -> None:
    short = RouteAsk("model", words("short", 3 * BLOCK_TOKENS))
    for mode, reason in ((SplitMode.AUTO, SplitReason.SHORT), (SplitMode.ALWAYS, "always")):
        fleet = Roles(Role.PREFILL, Role.DECODE, mode=mode)
        fleet.tell(1, Role.DECODE, decoding=20)
        assert fleet.plan(short).reason == reason
    less = RouteAsk("model", words("less", BLOCK_TOKENS))
    assert fleet.plan(less).reason is SplitReason.SHORT


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ((Role.PREFILL, Role.PREFILL), SplitReason.NO_WORKER),
        ((Role.DECODE, Role.DECODE), SplitReason.NO_WORKER),
        ((Role.PREFILL, Role.DECODE), SplitReason.ALWAYS),
        ((Role.PREFILL, Role.BOTH), SplitReason.ALWAYS),
        ((Role.BOTH, Role.DECODE), SplitReason.ALWAYS),
    ],
)
def test_it_takes_a_worker_for_each_half(roles: tuple[Role, ...], reason: SplitReason) -> None:
    fleet = Roles(*roles, mode=SplitMode.ALWAYS)
    plan = fleet.plan()
    if reason is SplitReason.ALWAYS and not plan.is_split:
        assert plan.reason is SplitReason.SAME_WORKER  # BOTH is as good for either half
    else:
        assert plan.reason is reason


def test_text_without_a_tokenizer_and_prompts_without_an_index_are_served_whole() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, mode=SplitMode.ALWAYS)
    assert fleet.plan(replace(ASK, kind=PromptKind.TEXT)).reason is SplitReason.BLIND
    fleet.bench.replica.lose()
    fleet.bench.advance(400.0)
    assert fleet.bench.route().knowledge is Knowledge.HASHED
    assert fleet.plan().reason is SplitReason.BLIND


def test_workers_without_stores_cannot_share_a_request() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, mode=SplitMode.ALWAYS)
    fleet.tell(1, Role.DECODE, store="")
    assert fleet.plan().reason is SplitReason.APART
    fleet.tell(0, Role.PREFILL, store="")
    fleet.tell(1, Role.DECODE)
    assert fleet.plan().reason is SplitReason.APART


def test_the_second_half_goes_to_the_store_that_has_the_blocks_and_is_placed_as_a_hit() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, Role.DECODE, one_store=False)
    fleet.tell(2, Role.DECODE, store="store0")
    router = fleet.bench.router
    first = router.route(replace(ASK, stage=Role.PREFILL))
    assert first.worker == name(0)
    left = fleet.splitter.prefilled(first, len(PROMPT))
    for _ in range(8):
        second = router.route(replace(ASK, stage=Role.DECODE, prefilled=left))
        assert second.worker == name(2)
        assert second.reused_tokens >= len(PROMPT) - BLOCK_TOKENS
        second.placement.first_token(0.01)
        second.placement.finished(Usage(len(PROMPT), 4, len(PROMPT) - 1))


def test_stores_that_do_not_reach_each_other_are_left_alone_for_longer_and_longer() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, mode=SplitMode.ALWAYS, one_store=False)
    assert fleet.plan().is_split
    first = fleet.bench.router.route(replace(ASK, stage=Role.PREFILL))
    left = fleet.splitter.prefilled(first, len(PROMPT))
    second = fleet.bench.router.route(replace(ASK, stage=Role.DECODE, prefilled=left))
    for one in (first, second):
        one.placement.failed(FailureKind.CANCELLED)
    for rest_s in (10.0, 20.0):
        fleet.splitter.used(left, second, 0)
        assert fleet.plan().reason is SplitReason.APART
        fleet.bench.clock.now += rest_s + 0.1
        assert fleet.plan().is_split
    fleet.splitter.used(left, second, len(PROMPT))
    fleet.splitter.used(left, second, 0)
    fleet.bench.clock.now += 10.1
    assert fleet.plan().is_split


def test_a_store_that_takes_nothing_is_not_written_to_for_a_while() -> None:
    fleet = Roles(Role.PREFILL, Role.DECODE, mode=SplitMode.ALWAYS)
    first = fleet.bench.router.route(replace(ASK, stage=Role.PREFILL))
    fleet.splitter.stored(fleet.splitter.prefilled(first, 0), name(1), 0.0)
    assert fleet.plan().reason is SplitReason.APART


def test_a_minimum_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        SplitPolicy(tokens_min=0)
