"""Sampling against a naive numpy twin, by exact probabilities rather than by statistics."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import BackendError, CallerError, LimitError
from kvtier.limits import LOGIT_BIASES_COUNT_MAX
from kvtier.paged.sampling import Draw, SamplingTerms, distribution, sample, uniform

Row = npt.NDArray[np.float64]

GREEDY = SamplingTerms(temperature=0.0)
LOGITS = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=40)
"""Whole numbers, so that ties are common."""
TERMS = st.builds(
    SamplingTerms,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.integers(0, 45),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
)


def naive_distribution(logits: list[float], terms: SamplingTerms, generated: list[int]) -> Row:
    """Probabilities, written as the definitions say, one token at a time."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in terms.logit_bias:
        x[token] += bias
    for token in set(generated):
        x[token] -= terms.presence_penalty + terms.frequency_penalty * generated.count(token)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if terms.temperature == 0:
        x[:] = 0
        x[order[0]] = 1
        return x
    p = np.exp((x - x.max()) / terms.temperature)
    kept = [i for i in order if p[i] >= terms.min_p]
    kept = kept[: terms.top_k] if terms.top_k else kept
    total, sum_so_far, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        sum_so_far += p[i]
        if sum_so_far >= terms.top_p * total:
            break
    result: Row = np.zeros(len(x))
    result[nucleus] = p[nucleus]
    result /= result.sum()
    return result


def probabilities(logits: list[float], terms: SamplingTerms, generated: list[int]) -> Row:
    weights = distribution(torch.tensor(logits), terms, generated)
    row: Row = (weights / weights.sum()).numpy()
    return row


def one(logits: list[float], terms: SamplingTerms, generated: tuple[int, ...] = ()) -> int:
    return sample(torch.tensor([logits]), [Draw(terms, generated)])[0].token_id


@settings(max_examples=300, deadline=None)
@given(LOGITS, TERMS, st.data())
def test_the_distribution_equals_the_naive_twins(
    logits: list[float], terms: SamplingTerms, data: st.DataObject
) -> None:
    generated = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=6))
    got = probabilities(logits, terms, generated)
    near_edges = []
    for nudge in (-1e-9, 0.0, 1e-9):  # a sum may end just before or just after the edge of top-p
        share = terms.top_p if terms.top_p in (0.0, 1.0) else terms.top_p + nudge
        edged = SamplingTerms(
            **{name: getattr(terms, name) for name in terms.__slots__} | {"top_p": share}
        )
        near_edges.append(naive_distribution(logits, edged, generated))
    assert any(
        np.array_equal(got > 0, wanted > 0) and np.allclose(got, wanted, rtol=1e-12, atol=0)
        for wanted in near_edges
    )


@settings(max_examples=200, deadline=None)
@given(LOGITS, TERMS)
def test_a_draw_inverts_the_cumulative_distribution(
    logits: list[float], terms: SamplingTerms
) -> None:
    got = one(logits, terms)
    p = probabilities(logits, terms, [])
    u = uniform(terms.seed, 0)
    assert p[got] > 0
    assert p[:got].sum() - 1e-12 <= u <= p[: got + 1].sum() + 1e-12


def test_every_token_owns_an_interval_as_long_as_its_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = [math.log(p) for p in (0.125, 0.25, 0.5, 0.125)]
    steps = 64
    counts = [0, 0, 0, 0]
    for i in range(steps):
        monkeypatch.setattr("kvtier.paged.sampling.uniform", lambda seed, at, u=i: (u + 0.5) / 64)
        counts[one(logits, SamplingTerms())] += 1
    assert counts == [8, 16, 32, 8]


def test_the_largest_random_number_still_draws_a_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.paged.sampling.uniform", lambda seed, position: 1.0)
    assert one([0.0, 0.0, -math.inf], SamplingTerms()) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(TERMS, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_a_draw_does_not_depend_on_its_batch_neighbours(
    terms: list[SamplingTerms], noise: int
) -> None:
    logits = torch.randn(len(terms), 300, generator=torch.Generator().manual_seed(noise))
    draws = [Draw(t, [1, 2, 2], 3) for t in terms]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert together == alone
    assert sample(logits.flip(0), draws[::-1]) == together[::-1]


def test_a_seed_gives_the_same_tokens_again_and_another_gives_others() -> None:
    logits = [0.0] * 1000

    def run(seed: int) -> list[int]:
        return [one(logits, SamplingTerms(seed=seed), (7,) * i) for i in range(8)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert len(set(run(3))) > 1, "each position draws a number of its own"


def test_the_random_numbers_are_pinned() -> None:
    """A change would give every seed another text."""
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(2**64 - 1, 5) == 0.9318107580365629
    assert all(0 <= uniform(9, i) < 1 for i in range(100))


def test_greedy_takes_the_lowest_of_equals_in_any_batch() -> None:
    logits = torch.zeros(5, 257)
    logits[:, [40, 200]] = 3.0
    assert [s.token_id for s in sample(logits, [Draw(GREEDY, ())] * 5)] == [40] * 5


def test_top_k_cuts_between_equals_in_favour_of_the_lower_id() -> None:
    assert probabilities([1.0, 2.0, 1.0, 1.0], SamplingTerms(top_k=2), []).nonzero()[
        0
    ].tolist() == [
        0,
        1,
    ]


def test_top_p_of_a_flat_distribution_keeps_its_share_with_the_lowest_ids() -> None:
    weights = distribution(torch.zeros(5000), SamplingTerms(top_p=0.5), ())
    assert weights.nonzero().flatten().tolist() == list(range(2500))


def test_a_tiny_temperature_is_greedy_and_not_a_nan() -> None:
    assert probabilities([1.0, 1.5, -3.0], SamplingTerms(temperature=1e-300), []).tolist() == [
        0,
        1,
        0,
    ]


def test_bias_and_penalties_also_steer_greedy_draws() -> None:
    logits = [1.0, 2.0, 0.0]
    assert one(logits, SamplingTerms(temperature=0, logit_bias=((2, 5.0),))) == 2
    assert one(logits, SamplingTerms(temperature=0, presence_penalty=1.5), (1,)) == 0
    assert one(logits, SamplingTerms(temperature=0, frequency_penalty=0.6), (1,)) == 1
    assert one(logits, SamplingTerms(temperature=0, frequency_penalty=0.6), (1, 1)) == 0


def test_logprobs_are_the_models_own_and_most_likely_first() -> None:
    p = [0.1, 0.2, 0.2, 0.5]
    terms = SamplingTerms(temperature=0, logit_bias=((0, 100.0),))
    logits = torch.tensor([[math.log(x) for x in p]])
    (got,) = sample(logits, [Draw(terms, (), 2)])
    assert got.token_id == 0
    assert got.logprob == pytest.approx(math.log(0.1))
    assert [token for token, _ in got.top] == [3, 1]
    assert [value for _, value in got.top] == pytest.approx([math.log(0.5), math.log(0.2)])
    (bare,) = sample(logits, [Draw(terms, (), 0)])
    assert (bare.logprob, bare.top) == (got.logprob, ())
    (many,) = sample(logits, [Draw(terms, (), 20)])
    assert [token for token, _ in many.top] == [3, 1, 2, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_the_backends_failure(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = bad
    with pytest.raises(BackendError, match="not numbers"):
        sample(logits, [Draw(GREEDY, ()), Draw(GREEDY, ())])


def test_masked_tokens_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf]
    assert {one(logits, SamplingTerms(seed=seed)) for seed in range(20)} == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 2.0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_terms_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        SamplingTerms(**wrong)  # type: ignore[arg-type]


def test_too_many_biases_are_refused() -> None:
    with pytest.raises(LimitError):
        SamplingTerms(logit_bias=((0, 0.0),) * (LOGIT_BIASES_COUNT_MAX + 1))


def test_a_bias_beyond_the_vocabulary_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(CallerError, match="beyond the vocabulary"):
        one([0.0, 0.0], SamplingTerms(logit_bias=((2, 1.0),)))
    with pytest.raises(CallerError, match="shape"):
        sample(torch.zeros(2, 4), [Draw(GREEDY, ())])
    assert sample(torch.zeros(0, 4), []) == []


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_draws_what_a_cpu_draws() -> None:
    logits = 3 * torch.randn(24, 50_000, generator=torch.Generator().manual_seed(1))
    kinds = [
        GREEDY,
        SamplingTerms(seed=1),
        SamplingTerms(seed=2, top_p=0.9),
        SamplingTerms(seed=3, top_k=40, temperature=0.7),
        SamplingTerms(seed=4, min_p=0.05, presence_penalty=1.0, logit_bias=((7, 2.0),)),
        SamplingTerms(seed=5, top_k=100, top_p=0.5),
    ]
    draws = [Draw(kinds[i % len(kinds)], [1, 5, 5], 3) for i in range(len(logits))]
    on_cpu, on_device = sample(logits, draws), sample(logits.cuda(), draws)
    assert [s.token_id for s in on_device] == [s.token_id for s in on_cpu]
    for here, there in zip(on_cpu, on_device, strict=True):
        assert [token for token, _ in there.top] == [token for token, _ in here.top]
        assert there.logprob == pytest.approx(here.logprob, abs=1e-4)
