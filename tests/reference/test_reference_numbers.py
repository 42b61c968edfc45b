"""The reference against the printed numbers of advantages, shaping, corrections, penalties, masks, aggregation."""

import math

import pytest

from tests.reference import advantages, aggregation, corrections, metrics, objectives, penalties, ratios, vectors
from tests.reference.batch import Batch, mean
from tests.reference.examples import batch_v

REWARDS = [1, 0, 0, 0.5, 1, 1, 1, 1]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]
LENGTHS = [4, 3, 2, 5, 2, 2, 3, 3]


def close(computed: list[float], printed: list[float], tolerance: float = 1e-11) -> None:
    assert computed[: len(printed)] == pytest.approx(printed, abs=tolerance)


def test_group_z_scores() -> None:
    printed = [1.507553086534, -0.904531851920, -0.904531851920, 0.301510617307, 0, 0, 0, 0]
    close(advantages.group_z(REWARDS, GROUP), printed)
    close(
        advantages.group_z(REWARDS, GROUP, ddof=1),
        [1.305579692401, -0.783347815440, -0.783347815440, 0.261115938480, 0, 0, 0, 0],
    )
    close(advantages.group_z(REWARDS, GROUP, ddof=1, epsilon=1e-4), [1.305309749354, -0.783185849612])
    close(advantages.group_z([1, 0, 1, 0], [0] * 4, epsilon=0), [1, -1, 1, -1])
    close(advantages.group_z([1, 0, 1, 0], [0] * 4, ddof=1, epsilon=0), [0.8660254], 1e-7)


def test_centres_and_leave_one_out() -> None:
    close(advantages.group_centre(REWARDS, GROUP), [0.625, -0.375, -0.375, 0.125, 0, 0, 0, 0])
    close(advantages.leave_one_out(REWARDS, GROUP), [0.833333333333, -0.5, -0.5, 0.166666666667, 0, 0, 0, 0])
    close(
        advantages.length_weighted(REWARDS, GROUP, LENGTHS),
        [0.535714285714, -0.464285714286, -0.464285714286, 0.035714285714],
    )


def test_group_mean_with_the_deviation_of_the_batch() -> None:
    close(
        advantages.group_centre_batch_std(REWARDS, GROUP, ddof=1),
        [1.364144249949, -0.818486549969, -0.818486549969, 0.272828849990, 0, 0, 0, 0],
    )


def test_z_scores_over_the_batch_depend_on_the_unit() -> None:
    centred = advantages.group_centre(REWARDS, GROUP)
    close(
        advantages.batch_z(centred, LENGTHS),
        [2.132007163556, -1.279204298134, -1.279204298134, 0.426401432711, 0, 0, 0, 0],
    )
    close(
        advantages.batch_z(centred, LENGTHS, unit="token"),
        [1.859339360403, -1.386052977755, -1.386052977755, 0.236643191324, *[-0.169030850946] * 4],
    )
    by_token = advantages.batch_z(centred, LENGTHS, unit="token", ddof=1)
    # The printed ddof 1 numbers carry verl's 1e-8 under the square root.
    close(by_token, [1.820190897593, -1.356869578206, -1.356869578206, 0.231660659694, -0.165471899781], 1e-6)


def test_gae_carries_over_tool_tokens() -> None:
    rewards, values = [0, 0, 0, 0, 1], [0.2, 0.3, 0.9, 0.4, 0.6]
    tool = [True, True, False, True, True]
    close(advantages.gae(rewards, values, tool), [0.71845, 0.651, 0.0, 0.58, 0.4])
    close(advantages.gae(rewards, values, tool, gamma=0.99), [0.69165285055, 0.6322731, 0.0, 0.5702, 0.4])
    plain = advantages.gae(rewards, values, [True] * 5)
    close(plain, [0.7160275, 0.64845, 0.051, 0.58, 0.4])
    close([a + v for a, v in zip(plain, values, strict=True)], [0.9160275, 0.94845, 0.951, 0.98, 1.0])


def test_pass_at_k() -> None:
    close(list(advantages.pass_at_k(8, 2, 1)), [0.25, 1.732050807569, -0.577350269190])
    close(list(advantages.pass_at_k(8, 2, 4)), [0.785714285714, 0.522232967867, -0.174077655956])
    close(list(advantages.pass_at_k(8, 1, 4)), [0.5, 1, -0.142857142857])
    assert advantages.pass_at_k(8, 5, 4) == (1.0, 0.0, 0.0)
    close(list(advantages.pass_at_k_reward(8, 2, 4)), [0.5, 0.357142857143])


def test_several_rewards() -> None:
    components = [[1, 0, 1, 0], [0, 0, 1, 0]]
    separate = advantages.gdpo(components, [0] * 4, [1, 1], ddof=1)
    close(separate, [0.206078237368, -0.769094095256, 1.332109953144, -0.769094095256])
    together = advantages.group_z([1, 0, 2, 0], [0] * 4, ddof=1)
    close(together, [0.261116211207, -0.783348633620, 1.305581056033, -0.783348633620])


def test_turn_returns() -> None:
    rewards = [[0.2, 0, 1], [0, 0.2, 0], [0.2, 0.2]]
    assert [advantages.returns_to_go(row) for row in rewards] == [[1.2, 1, 1], [0.2, 0.2, 0], [0.4, 0.2]]
    centred = advantages.turn_returns(rewards, [0] * 3)
    close(centred[0], [0.6, 0.533333333333, 0.5])
    close(centred[1], [-0.4, -0.266666666667, -0.5])
    close(centred[2], [-0.2, -0.266666666667])
    scored = advantages.turn_returns(rewards, [0] * 3, normalise="z")
    close(scored[0], [1.388730149659, 1.414213562373, 1])
    close(scored[1], [-0.925820099773, -0.707106781187, -1])
    close(scored[2], [-0.462910049886, -0.707106781187])


def test_a_turn_reached_alone_has_no_baseline() -> None:
    assert advantages.turn_returns([[1.0, 0.5], [0.2]], [0, 0])[0][1] == 0.0


def test_states_shared_between_episodes() -> None:
    result = advantages.gigpo([1, 0], [[0, 1], [0, 0]], [[0, 1], [0, 2]], [0, 0])
    close(result[0], [0.975, 0.5])
    close(result[1], [-0.975, -0.5])


@pytest.mark.parametrize(
    ("length", "maximum", "cache", "penalty"),
    [
        (79, 100, 20, 0), (80, 100, 20, 0), (81, 100, 20, -0.05), (90, 100, 20, -0.5), (100, 100, 20, -1),
        (101, 100, 20, -1), (16384, 20480, 4096, 0), (16385, 20480, 4096, -0.000244140625), (18432, 20480, 4096, -0.5),
        (20480, 20480, 4096, -1), (20481, 20480, 4096, -1),
    ],
)  # fmt: skip
def test_overlong_responses_are_punished_softly(length: int, maximum: int, cache: int, penalty: float) -> None:
    assert advantages.overlong_penalty(length, maximum, cache) == pytest.approx(penalty, abs=1e-15)


def test_behaviour_statistics_per_sequence() -> None:
    batch = batch_v()
    product = [row[0] for row in corrections.behaviour_ratios(batch, "product")]
    close(product, [1.0408107742, 0.4274149319, 2.0137527075, 5.3655559711], 1e-10)
    geometric = [row[0] for row in corrections.behaviour_ratios(batch, "sequence")]
    close(geometric, [1.0100501671, 0.7532686565, 1.4190675486, 1.3993390248], 1e-10)
    k3 = [corrections.mean_k3(batch, row) for row in range(4)]
    close(k3, [0.0003799842, 0.1024085112, 0.2151891733, 0.5550856647], 1e-10)
    log_ratios = corrections.behaviour_log_ratios(batch)
    close([max(le * le / 2 for le in row) for row in log_ratios], [0.00125, 0.405, 0.32, 1.445], 1e-12)
    assert metrics.effective_sample_size(product) == pytest.approx(2.294870572729, abs=1e-10)


def test_behaviour_statistics_of_the_batch() -> None:
    batch = batch_v()
    assert metrics.sampler_k1(batch) == pytest.approx(-0.11214286, abs=1e-8)
    assert metrics.sampler_k3(batch) == pytest.approx(0.25103944, abs=1e-8)
    assert metrics.sampler_chi_squared(batch) == pytest.approx(2.28970147, abs=1e-8)
    tokens = list(batch.tokens())
    for weights, printed, tolerance in [
        (corrections.uncapped(batch, "token"), 0.5648737385, 1e-10),
        (corrections.truncated(batch, "token"), 0.883402, 1e-6),
        (corrections.masked_outside(batch, "token"), 0.781929, 1e-6),
    ]:
        weight_list = [weights[row][position] for row, position in tokens]
        assert metrics.effective_sample_size(weight_list) / 14 == pytest.approx(printed, abs=tolerance)
    assert metrics.effective_sample_size([4, 1, 1, 1]) == pytest.approx(2.578947368421, abs=1e-11)


def test_gspo_with_a_sequence_weight() -> None:
    assert vectors.gspo_with_geometric_tis(batch_v(), 1.2).loss == pytest.approx(0.016177749014, abs=1e-12)


def test_kl_per_sequence_and_under_each_aggregation() -> None:
    batch = batch_v()
    per_sequence = []
    for row in range(4):
        lr = [batch.ref[row][position] - batch.new[row][position] for position in batch.positions(row)]
        per_sequence.append(mean([penalties.estimate("k3", value)[0] for value in lr]))
    close(per_sequence, [0.016076757219, 0.054077913871, 0.007772697231, 0.049312757116])
    for aggregate, printed in [
        (aggregation.sequence_mean, 0.031810031359),
        (aggregation.token_mean, 0.034903567895),
        (aggregation.sequence_sum, 0.122162487632),
    ]:
        assert penalties.kl(batch, aggregate(batch), beta=1.0).loss == pytest.approx(printed, abs=1e-11)


def test_expected_kl_estimators_and_their_gradients_on_three_tokens() -> None:
    new, ref = ratios.log_softmax([0.2, -0.1, 0.4]), ratios.log_softmax([0, 0.3, -0.2])
    probability = [math.exp(value) for value in new]
    estimates = {}
    for name in ("k1", "k2", "k3"):
        values = [penalties.estimate(name, r - n)[0] for r, n in zip(ref, new, strict=True)]
        estimates[name] = sum(p * value for p, value in zip(probability, values, strict=True))
    assert estimates["k1"] == pytest.approx(0.082224645920, abs=1e-11)
    assert estimates["k3"] == pytest.approx(0.082224645920, abs=1e-11)
    assert estimates["k2"] == pytest.approx(0.081271892198, abs=1e-11)
    reverse = [-0.005022382991, -0.153773938804, 0.158796321794]
    close(expected_gradient(new, ref, "k2"), reverse)
    close(expected_gradient(new, ref, "k3"), [0.021986704486, -0.175923738328, 0.153937033842])
    close(expected_gradient(new, ref, "ratio-weighted"), reverse)
    close(expected_gradient(new, ref, "straight-through"), reverse)


def expected_gradient(new: list[float], ref: list[float], form: str) -> list[float]:
    """E over tokens y of (d term / d new_y) (1[k = y] - p_k), the gradient in the logits."""
    probability = [math.exp(value) for value in new]
    gradient = [0.0] * 3
    for token in range(3):
        batch = Batch(
            new=[[new[token]]], old=[[new[token]]], ref=[[ref[token]]], mask=[[True]], advantages=[[0.0]], group=[0]
        )
        weight = [[1.0]]
        if form == "ratio-weighted":
            derivative = penalties.kl_ratio_weighted(batch, weight, 1.0).gradient[0][0]
        elif form == "straight-through":
            derivative = penalties.kl_straight_through(batch, weight, 1.0).gradient[0][0]
        else:
            derivative = penalties.kl(batch, weight, 1.0, form).gradient[0][0]
        for k in range(3):
            gradient[k] += probability[token] * derivative * ((k == token) - probability[k])
    return gradient


def test_entropy_bonus_is_a_token_mean() -> None:
    probability = [math.exp(value) for value in ratios.log_softmax([0.2, -0.1, 0.4])]
    entropy = -sum(p * math.log(p) for p in probability)
    assert entropy == pytest.approx(1.078500613539, abs=1e-11)
    derivatives = [-p * (math.log(p) + entropy) for p in probability]
    close(derivatives, [0.002511191495, 0.076886969402, -0.079398160897])
    batch = batch_v()
    loss, gradient = penalties.entropy_bonus(
        Batch(new=batch.new, old=batch.old, mask=batch.mask, advantages=batch.advantages, group=batch.group,
              entropy=[[entropy] * 5] * 4), 0.01,
    )  # fmt: skip
    assert loss == pytest.approx(-0.01 * entropy, abs=1e-15)
    assert gradient[2] == pytest.approx([-0.01 / 14, -0.01 / 14, 0, 0, 0], abs=1e-15)


def test_empty_rows_leave_the_mean_and_masked_tokens_do_not_matter() -> None:
    batch = Batch(
        new=[[0.1, -0.3, 0.2], [math.nan] * 3, [0.05, 9.0, -0.02]],
        old=[[0.0] * 3] * 3,
        mask=[[True, True, False], [False] * 3, [True, False, True]],
        advantages=[[1.0] * 3, [1.0] * 3, [-1.0] * 3],
        group=[0, 0, 0],
    )
    assert [metrics.sequence_ratio(batch, row) for row in (0, 2)] == pytest.approx(
        [0.904837418036, 1.015113064616], abs=1e-12
    )
    result = objectives.clipped_segments(
        batch, aggregation.sequence_mean(batch), ratios.token_log_ratios(batch, limit=None), 0.2, 0.2
    )
    assert result.loss == pytest.approx(0.055137823290, abs=1e-12)
    assert result.gradient[1] == [0.0] * 3


def test_aggregations_of_the_two_group_example() -> None:
    losses = [[1, 1, 0, 0], [2, 2, 2, 2], [3, 0, 0, 0]]
    batch = Batch(
        new=[[0.0] * 4] * 3,
        old=[[0.0] * 4] * 3,
        mask=[[True, True, False, False], [True] * 4, [True, False, False, False]],
        advantages=[[0.0] * 4] * 3,
        group=[0, 0, 1],
    )

    def weighted_sum(weight: list[list[float]]) -> float:
        return sum(weight[row][position] * losses[row][position] for row, position in batch.tokens())

    assert weighted_sum(aggregation.token_mean(batch)) == pytest.approx(13 / 7)
    assert weighted_sum(aggregation.group_token_mean(batch)) == pytest.approx(7 / 3)
    assert weighted_sum(aggregation.sequence_mean(batch)) == pytest.approx(2)
    assert weighted_sum(aggregation.sequence_sum(batch)) == pytest.approx(13 / 3)
    assert weighted_sum(aggregation.sequence_sum_over_constant(batch, 8)) == pytest.approx(13 / 24)
