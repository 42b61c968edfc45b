"""From rewards to advantages: baselines over a group, scales over group or batch, credit over turns and tokens."""

import math
from collections.abc import Callable

from tests.reference.batch import Rows, deviation, mean

ZERO_VARIANCE = 1e-6


def per_group(rewards: list[float], group: list[int], rule: Callable[[list[float]], list[float]]) -> list[float]:
    """Apply a rule to the rewards of each group, in row order."""
    result = [0.0] * len(rewards)
    for group_id in set(group):
        rows = [row for row, name in enumerate(group) if name == group_id]
        for row, value in zip(rows, rule([rewards[row] for row in rows]), strict=True):
            result[row] = value
    return result


def z_scores(rewards: list[float], ddof: int = 0, epsilon: float = 1e-6) -> list[float]:
    """(r - mean) / (std + epsilon); a single reward, or rewards without variance, give exactly 0."""
    centre = mean(rewards)
    if len(rewards) < 2 or deviation(rewards) <= ZERO_VARIANCE * max(1.0, abs(centre)):
        return [0.0] * len(rewards)
    scale = deviation(rewards, ddof) + epsilon
    return [(reward - centre) / scale for reward in rewards]


def group_z(rewards: list[float], group: list[int], ddof: int = 0, epsilon: float = 1e-6) -> list[float]:
    """The z-score of each reward in its group."""
    return per_group(rewards, group, lambda values: z_scores(values, ddof, epsilon))


def centre_on_mean(rewards: list[float]) -> list[float]:
    """r - mean."""
    return [reward - mean(rewards) for reward in rewards]


def group_centre(rewards: list[float], group: list[int]) -> list[float]:
    """r - mean of the group."""
    return per_group(rewards, group, centre_on_mean)


def leave_one_out(rewards: list[float], group: list[int]) -> list[float]:
    """r - mean of the others; 0 where there are none."""

    def rule(values: list[float]) -> list[float]:
        if len(values) < 2:
            return [0.0]
        return [value - (math.fsum(values) - value) / (len(values) - 1) for value in values]

    return per_group(rewards, group, rule)


def group_centre_batch_std(rewards: list[float], group: list[int], ddof: int = 0, epsilon: float = 1e-4) -> list[float]:
    """(r - mean of the group) / (std of all rewards + epsilon)."""
    scale = deviation(rewards, ddof) + epsilon
    return [value / scale for value in group_centre(rewards, group)]


def batch_z(
    values: list[float], lengths: list[int], unit: str = "sequence", ddof: int = 0, epsilon: float = 0.0
) -> list[float]:
    """z-score over the batch, each sequence or each token being one sample."""
    samples = values if unit == "sequence" else [v for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    return [(value - mean(samples)) / (deviation(samples, ddof) + epsilon) for value in values]


def length_weighted(rewards: list[float], group: list[int], lengths: list[int]) -> list[float]:
    """OPO: r - sum L r / sum L over the group."""
    result = [0.0] * len(rewards)
    for group_id in set(group):
        rows = [row for row, name in enumerate(group) if name == group_id]
        baseline = math.fsum(lengths[row] * rewards[row] for row in rows) / sum(lengths[row] for row in rows)
        for row in rows:
            result[row] = rewards[row] - baseline
    return result


def gae(rewards: list[float], values: list[float], mask: list[bool], gamma: float = 1.0, lam: float = 0.95) -> list[float]:
    """A_t = delta_t + gamma lambda A_next, delta_t = r_t + gamma v_next - v_t; masked positions carry both."""
    advantages = [0.0] * len(rewards)
    next_value, next_advantage = 0.0, 0.0
    for position in reversed(range(len(rewards))):
        if not mask[position]:
            continue
        delta = rewards[position] + gamma * next_value - values[position]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[position]
        advantages[position] = next_advantage
    return advantages


def token_rewards(
    score: float, mask: list[bool], old: list[float] | None = None, ref: list[float] | None = None, beta: float = 0.0
) -> list[float]:
    """r_t = -beta (old_t - ref_t), and the score on the last token inside the mask."""
    positions = [position for position, counted in enumerate(mask) if counted]
    rewards = [0.0] * len(mask)
    for position in positions:
        if beta:
            rewards[position] = -beta * (old[position] - ref[position])
    if positions:
        rewards[positions[-1]] += score
    return rewards


def whiten(rows: Rows, mask: list[list[bool]]) -> Rows:
    """(A - mean) / std over the tokens of the batch, population std."""
    pairs = [pair for row, counted in zip(rows, mask, strict=True) for pair in zip(row, counted, strict=True)]
    samples = [value for value, counted in pairs if counted]
    centre, scale = mean(samples), deviation(samples)
    return [
        [(value - centre) / scale if c else 0.0 for value, c in zip(row, counted, strict=True)]
        for row, counted in zip(rows, mask, strict=True)
    ]


def pass_at_k(samples: int, correct: int, k: int) -> tuple[float, float, float]:
    """(R, advantage of a correct one, advantage of a wrong one); R = 1 - C(n - c, k) / C(n, k)."""
    reward = 1 - math.comb(samples - correct, k) / math.comb(samples, k)
    scale = math.sqrt(reward * (1 - reward))
    if scale == 0 or samples == 1:
        return reward, 0.0, 0.0
    wrong = math.comb(samples - correct - 1, k - 1) / math.comb(samples - 1, k - 1)
    return reward, (1 - reward) / scale, (1 - reward - wrong) / scale


def pass_at_k_reward(samples: int, correct: int, k: int) -> tuple[float, float]:
    """PKPO: k / n for a correct one, (k / n) rho(n - 1, c, k - 1) for a wrong one, rho = pass@(k - 1) of others."""
    others = 1 - math.comb(samples - 1 - correct, k - 1) / math.comb(samples - 1, k - 1)
    return k / samples, (k / samples) * others


def gdpo(components: Rows, group: list[int], weights: list[float], ddof: int = 0, epsilon: float = 1e-6) -> list[float]:
    """z-score each reward per group, weigh, add, then z-score over the batch. `components`: one row per reward."""
    scored = [group_z(rewards, group, ddof, epsilon) for rewards in components]
    rows = range(len(group))
    total = [math.fsum(weight * score[row] for weight, score in zip(weights, scored, strict=True)) for row in rows]
    return z_scores(total, ddof, epsilon)


def returns_to_go(rewards: list[float], gamma: float = 1.0) -> list[float]:
    """G_u = sum over v >= u of gamma^(v - u) r_v."""
    result, following = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        following = rewards[turn] + gamma * following
        result[turn] = following
    return result


def turn_returns(turn_rewards: Rows, group: list[int], gamma: float = 1.0, normalise: str = "centre") -> Rows:
    """Return-to-go less the mean of the group members that reached the turn; a turn reached by one alone gives 0."""
    returns = [returns_to_go(rewards, gamma) for rewards in turn_rewards]
    result = [[0.0] * len(rewards) for rewards in turn_rewards]
    for turn in range(max(len(rewards) for rewards in turn_rewards)):
        rows = [row for row, rewards in enumerate(turn_rewards) if len(rewards) > turn]
        for group_id in {group[row] for row in rows}:
            members = [row for row in rows if group[row] == group_id]
            values = [returns[row][turn] for row in members]
            scored = centre_on_mean(values) if normalise == "centre" else z_scores(values, epsilon=0.0)
            for row, value in zip(members, scored, strict=True):
                result[row][turn] = value
    return result


def gigpo(
    rewards: list[float],
    turn_rewards: Rows,
    states: list[list[int]],
    group: list[int],
    omega: float = 1.0,
    gamma: float = 0.95,
) -> Rows:
    """A_iu = (r_i - mean of the group) + omega (G_iu - mean of G over the steps of the group in the same state)."""
    episode = group_centre(rewards, group)
    returns = [returns_to_go(values, gamma) for values in turn_rewards]
    shared: dict[tuple[int, int], list[float]] = {}
    for row, row_states in enumerate(states):
        for turn, state in enumerate(row_states):
            shared.setdefault((group[row], state), []).append(returns[row][turn])
    return [
        [
            episode[row] + omega * (returns[row][turn] - mean(shared[group[row], state]))
            for turn, state in enumerate(row_states)
        ]
        for row, row_states in enumerate(states)
    ]


def overlong_penalty(length: int, maximum: int, cache: int) -> float:
    """0 up to maximum - cache, then linearly down to -1 at the maximum, -1 beyond."""
    if length <= maximum - cache:
        return 0.0
    if length <= maximum:
        return (maximum - cache - length) / cache
    return -1.0


def reward_less_kl(reward: float, old: list[float], ref: list[float], positions: list[int], beta: float) -> float:
    """r_i - beta sum_t (old - ref)."""
    return reward - beta * math.fsum(old[position] - ref[position] for position in positions)
