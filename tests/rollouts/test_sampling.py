"""Sampling: token frequencies against the distribution, the mass truncation keeps, and the random numbers."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.randomness import seed_of, uniform
from legato.rollouts.sampling import Sampling, choose
from tests.policy.exact import family, policy_of

DRAWS = 20_000
KINDS = {
    "plain": Sampling(),
    "hot": Sampling(temperature=2.0),
    "cold": Sampling(temperature=0.5),
    "top-k": Sampling(top_k=4),
    "top-p": Sampling(top_p=0.7),
    "min-p": Sampling(min_p=0.08),
    "all at once": Sampling(temperature=1.4, top_k=8, top_p=0.9, min_p=0.1),
}


def chi_square_limit(freedom: int) -> float:
    """The 99.9 percent quantile of chi-square, by the approximation of Wilson and Hilferty."""
    third = 2 / (9 * freedom)
    return freedom * (1 - third + 3.0902 * math.sqrt(third)) ** 3


def expected_chances(logits: Tensor, sampling: Sampling) -> list[float]:
    """Token probabilities after temperature and truncation, by their definitions in plain Python."""
    weights = [math.exp(float(z) / sampling.temperature) for z in logits]
    chances = [w / sum(weights) for w in weights]
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    kept = order[: sampling.top_k] if sampling.top_k else order
    kept = [token for token in kept if chances[token] >= sampling.min_p * chances[order[0]]]
    if sampling.top_p < 1:
        mass, total, nucleus = 0.0, sum(chances[token] for token in kept), []
        for token in kept:
            nucleus.append(token)
            mass += chances[token] / total
            if mass >= sampling.top_p:
                break
        kept = nucleus
    total = sum(chances[token] for token in kept)
    return [chances[token] / total if token in kept else 0.0 for token in range(len(chances))]


def chi_square(counts: Counter[int], chances: list[float], draws: int) -> tuple[float, int]:
    """Chi-square and its degrees of freedom; tokens with fewer than 5 expected draws share one cell."""
    assert all(chances[token] > 0 for token in counts)
    cells = [(counts[token], chance * draws) for token, chance in enumerate(chances) if chance * draws >= 5]
    rare = [(counts[token], chance * draws) for token, chance in enumerate(chances) if 0 < chance * draws < 5]
    if sum(chance for _, chance in rare) >= 5:
        cells.append((sum(count for count, _ in rare), sum(chance for _, chance in rare)))
    return sum((count - chance) ** 2 / chance for count, chance in cells), len(cells) - 1


def some_logits(size: int = 12, seed: int = 4) -> Tensor:
    return 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("name", KINDS)
def test_token_frequencies_match_the_distribution(name: str, place: int) -> None:
    logits, sampling = some_logits(), KINDS[name]
    seeds = torch.tensor([seed_of(name, number) for number in range(DRAWS)])
    tokens = choose(logits.expand(DRAWS, -1), uniform(seeds, place), sampling).tokens
    statistic, freedom = chi_square(Counter(tokens.tolist()), expected_chances(logits, sampling), DRAWS)
    assert freedom >= 2 and statistic < chi_square_limit(freedom)


def test_the_frequency_test_detects_a_wrong_temperature() -> None:
    logits = some_logits()
    seeds = torch.tensor([seed_of("power", number) for number in range(DRAWS)])
    tokens = choose(logits.expand(DRAWS, -1), uniform(seeds, 0), Sampling(temperature=1.1)).tokens
    statistic, freedom = chi_square(Counter(tokens.tolist()), expected_chances(logits, Sampling()), DRAWS)
    assert statistic > 2 * chi_square_limit(freedom)


@pytest.mark.parametrize("name", ["plain", "top-p"])
def test_the_engine_draws_token_pairs_as_often_as_the_model_predicts(name: str) -> None:
    policy = policy_of(family("qwen3", vocab_size=8))
    prompt, sampling, draws = torch.tensor([2, 5, 3]), KINDS[name], 4000
    seeds = tuple(seed_of("engine", name, number) for number in range(draws))
    engine = LocalEngine(policy, rows_at_once=draws)
    (row,) = engine.generate([Request(prompt=prompt, seeds=seeds)], sampling, Limits(max_response_tokens=2, end_tokens=()))
    with torch.no_grad():
        first = expected_chances(policy.model(prompt[None]).logits[0, -1], sampling)
        second = [
            expected_chances(policy.model(torch.cat([prompt, torch.tensor([token])])[None]).logits[0, -1], sampling)
            for token in range(8)
        ]
    chances = [first[a] * second[a][b] for a in range(8) for b in range(8)]
    pairs = Counter(8 * int(response.tokens[0]) + int(response.tokens[1]) for response in row)
    statistic, freedom = chi_square(pairs, chances, draws)
    assert freedom >= 3 and statistic < chi_square_limit(freedom)


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all at once"])
def test_the_kept_mass_is_the_sum_over_tokens_that_can_be_drawn(name: str) -> None:
    for seed in range(20):
        logits, sampling = some_logits(seed=seed), KINDS[name]
        choice = choose(logits[None], torch.tensor([0.4], dtype=torch.float64), sampling)
        every = expected_chances(logits, Sampling(temperature=sampling.temperature))
        kept = [token for token, chance in enumerate(expected_chances(logits, sampling)) if chance > 0]
        assert choice.kept_logmass is not None
        assert abs(float(choice.kept_logmass) - math.log(sum(every[token] for token in kept))) < 1e-5


def test_the_log_prob_is_before_truncation_and_after_temperature() -> None:
    logits = some_logits()
    choice = choose(logits[None], torch.tensor([0.9], dtype=torch.float64), Sampling(temperature=0.7, top_k=2))
    expected = (logits.double() / 0.7).log_softmax(0)[choice.tokens[0]]
    assert abs(float(choice.logprobs) - float(expected)) < 1e-6


def test_the_ends_of_the_unit_interval_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf], [2.0, -200.0, -torch.inf, -torch.inf]])
    for number in (0.0, 1.0 - 2.0**-53):
        for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(min_p=0.1)):
            choice = choose(logits, torch.full((2,), number, dtype=torch.float64), sampling)
            assert bool(torch.isfinite(choice.logprobs).all())


def test_truncation_always_keeps_the_likeliest_token() -> None:
    logits = torch.zeros(1, 5)
    for sampling in (Sampling(top_p=1e-9), Sampling(top_k=1), Sampling(min_p=0.999)):
        choice = choose(logits, torch.tensor([0.99], dtype=torch.float64), sampling)
        assert choice.kept_logmass is not None and float(choice.kept_logmass) >= math.log(0.2) - 1e-6


def test_greedy_takes_the_likeliest_token_for_every_random_number() -> None:
    logits = some_logits().expand(50, -1)
    numbers = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert set(choose(logits, numbers, Sampling(temperature=0.0)).tokens.tolist()) == {int(logits[0].argmax())}


def test_top_k_beyond_the_vocabulary_keeps_every_token() -> None:
    logits = some_logits()
    number = torch.tensor([0.3], dtype=torch.float64)
    choice = choose(logits[None], number, Sampling(top_k=1000))
    assert choice.kept_logmass is not None and abs(float(choice.kept_logmass)) < 1e-6


def test_a_token_of_one_in_a_million_is_drawn_about_that_often() -> None:
    logits = torch.tensor([0.0, math.log(1e-6)])
    draws = 3_000_000
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = choose(logits.expand(draws, -1), numbers, Sampling()).tokens
    assert 2 <= int(tokens.sum()) <= 4


MASK = (1 << 64) - 1


def splitmix(seed: int, place: int) -> float:
    """The generator of Steele, Lea and Flood in plain integers: the state after place + 1 steps, mixed."""
    state = (seed + (place + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53


def test_random_numbers_match_splitmix64() -> None:
    seeds = [0, 1, 2, 1234567, (1 << 63) - 1, *(seed_of("known", k) for k in range(200))]
    for place in (0, 1, 5, 1023, 40_000):
        assert uniform(torch.tensor(seeds), place).tolist() == [splitmix(seed, place) for seed in seeds]


def test_random_numbers_match_the_published_values() -> None:
    # The first outputs for seed 1234567 in the reference implementation.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    numbers = uniform(torch.tensor([1234567]), torch.arange(5))
    assert numbers.tolist() == [(value >> 11) * 2.0**-53 for value in published]


def test_numbers_are_uniform_over_seeds_and_over_places() -> None:
    seeds = torch.tensor([seed_of("uniform", number) for number in range(4000)])
    for numbers in (uniform(seeds, 3), uniform(seeds[:1], torch.arange(4000)), uniform(torch.arange(4000), 0)):
        assert numbers.dtype == torch.float64 and float(numbers.min()) >= 0.0 and float(numbers.max()) < 1.0
        counts = Counter((numbers * 20).long().tolist())
        statistic, freedom = chi_square(counts, [1 / 20] * 20, 4000)
        assert statistic < chi_square_limit(freedom)


def test_neighbouring_seeds_and_places_are_uncorrelated() -> None:
    near, places = torch.arange(6000), torch.arange(6000)
    pairs = [
        (uniform(near, 0), uniform(near + 1, 0)),
        (uniform(near, 0), uniform(near, 1)),
        (uniform(torch.tensor([5]), places), uniform(torch.tensor([5]), places + 1)),
        (uniform(torch.tensor([5]), places), uniform(torch.tensor([6]), places)),
    ]
    for left, right in pairs:
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 4 / math.sqrt(6000)
        cells = Counter(((left * 6).long() * 6 + (right * 6).long()).tolist())
        statistic, freedom = chi_square(cells, [1 / 36] * 36, 6000)
        assert statistic < chi_square_limit(freedom)


def test_a_seed_depends_on_every_word_and_on_where_words_end() -> None:
    seeds = [seed_of(*words) for words in ((0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), ("0a", 1), (0, "a1"), ())]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(3, "x", 4) == seed_of(3, "x", 4)


@pytest.mark.parametrize("size", [255, 256, 257, 512, 1000])
def test_a_random_number_picks_the_token_where_the_exact_cdf_passes_it(size: int) -> None:
    logits = 2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    up_to = logits.double().softmax(0).cumsum(0)
    numbers = torch.cat([uniform(torch.arange(4000), 0), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)])
    tokens = choose(logits.expand(len(numbers), -1), numbers, Sampling()).tokens
    assert bool((numbers <= up_to[tokens] + 1e-6).all())
    assert bool((numbers >= up_to[tokens] - up_to.diff(prepend=up_to.new_zeros(1))[tokens] - 1e-6).all())
    assert int(tokens[-2]) == 0 and int(tokens[-1]) == size - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_tail_of_rare_tokens_counts_in_the_log_prob(temperature: float) -> None:
    # Each rare token vanishes beside 1 in float32; their sum does not.
    logits = torch.full((1, 100_000), math.log(2e-8))
    logits[0, ::8] = 0.0
    logits[0, 8:] = math.log(2e-8)
    choice = choose(logits, torch.tensor([0.0], dtype=torch.float64), Sampling(temperature=temperature))
    assert int(choice.tokens) == 0
    assert abs(float(choice.logprobs) - float(logits.double().log_softmax(1)[0, 0])) < 1e-6


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [300, 555]] = 0.0
    numbers = torch.linspace(0, 1 - 2.0**-53, 1001, dtype=torch.float64)
    tokens = choose(logits.expand(1001, -1), numbers, Sampling()).tokens
    assert set(tokens.tolist()) == {300, 555}
