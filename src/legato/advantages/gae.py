"""Generalised advantage estimation.

delta_t = r_t + gamma v_{t+1} - v_t, A_t = delta_t + gamma lam A_{t+1}, R_t = A_t + v_t. On masked (tool) positions the next
value and the next advantage are carried through unchanged: the recursion runs over the tokens the policy wrote.
"""

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores, divergence_needs
from legato.advantages.turns import Turns
from legato.core.bounded import choose
from legato.core.parts import choice, flag, number, part
from legato.core.scan import reverse_recurrence


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """[B, T]: the advantage of each position inside the mask, 0 outside."""
    values, rewards = torch.where(mask, values, 0.0), torch.where(mask, rewards, 0.0)
    # The value of the next position inside the mask: positions outside carry the following value on.
    carried = reverse_recurrence(values, (~mask).to(values.dtype))
    following = torch.cat([carried[:, 1:], torch.zeros_like(carried[:, :1])], dim=1)
    delta = torch.where(mask, rewards + gamma * following - values, 0.0)
    decay = choose(mask, gamma * lam, 1.0).to(values.dtype)
    return torch.where(mask, reverse_recurrence(delta, decay), 0.0)


@part("advantage", "gae")
class GeneralisedAdvantage(Estimator):
    """GAE over tokens or turns, with a value per token. Whitening touches the advantages, never the returns.

    The reward stands on the last token of the mask; the end of a response is terminal, also where it was cut.
    """

    needs_groups = False
    gamma: float = number(default=1.0, says="Discount.", minimum=0.0, maximum=1.0)
    lam: float = number(default=0.95, says="lambda: 0 trusts the values, 1 the rewards.", minimum=0.0, maximum=1.0)
    whiten: bool = flag(default=True, says="z-score over all tokens of the batch.")
    epsilon: float = number(default=1e-8, says="Added to the standard deviation of whitening.", minimum=0.0)
    level: str = choice(
        "token", "turn", default="token", says="'token', or 'turn': one action is one turn, valued at its first token."
    )
    reward_kl: float = number(default=0.0, says="beta of the per-token divergence inside the reward; 0: none.", minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        turn = ("turn",) if self.level == "turn" else ()
        return ("mask", "values", *turn, *divergence_needs(self.reward_kl))

    def estimate(self, scores: Scores) -> Estimate:
        assert scores.mask is not None and scores.values is not None
        tokens = scores.mask.tokens
        advantages = self._over_turns(scores) if self.level == "turn" else self._over_tokens(scores)
        returns = torch.where(tokens, advantages + self._baseline(scores), 0.0)
        if self.whiten:
            inside = advantages[tokens]
            if len(inside):
                advantages = (advantages - inside.mean()) / (inside.std(correction=0) + self.epsilon)
        return Estimate(advantages=torch.where(tokens, advantages, 0.0), returns=returns)

    def _over_tokens(self, scores: Scores) -> Tensor:
        assert scores.mask is not None and scores.values is not None
        tokens = scores.mask.tokens
        position = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(tokens, position, -1).amax(1, keepdim=True)
        rewards = torch.where(position == last, scores.rewards.unsqueeze(1), 0.0)
        rewards = rewards - self._divergence(scores)
        return gae(rewards, scores.values, tokens, self.gamma, self.lam)

    def _over_turns(self, scores: Scores) -> Tensor:
        turns = Turns.of(scores)
        penalty = torch.zeros_like(turns.rewards).scatter_add(1, turns.index, self._divergence(scores))
        per_turn = gae(turns.rewards - penalty, self._turn_values(scores, turns), turns.reached, self.gamma, self.lam)
        return turns.spread(per_turn)

    def _divergence(self, scores: Scores) -> Tensor:
        assert scores.mask is not None
        if self.reward_kl == 0:
            return torch.zeros(scores.mask.tokens.shape, dtype=torch.float64, device=scores.rewards.device)
        assert scores.old_logprobs is not None and scores.ref_logprobs is not None
        return self.reward_kl * scores.mask.select(scores.old_logprobs - scores.ref_logprobs)

    def _baseline(self, scores: Scores) -> Tensor:
        """[B, T]: the value each token's advantage was measured from."""
        assert scores.mask is not None and scores.values is not None
        if self.level == "token":
            return scores.mask.select(scores.values)
        turns = Turns.of(scores)
        return turns.spread(self._turn_values(scores, turns))

    def _turn_values(self, scores: Scores, turns: Turns) -> Tensor:
        """[B, U]: the value at the first token of each turn."""
        assert scores.values is not None
        width = turns.tokens.shape[1]
        position = torch.where(turns.tokens, torch.arange(width, device=turns.tokens.device), width - 1)
        start = torch.full(turns.reached.shape, width - 1, device=position.device)
        start = start.scatter_reduce(1, turns.index, position, "amin")
        return torch.where(turns.reached, scores.values.gather(1, start), 0.0)
