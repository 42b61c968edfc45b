"""The reward that an environment gave turn by turn."""

from legato.core.parts import Part, part
from legato.core.rollout import Rollout, Unscorable
from legato.rewards.verifiers import Verdict


@part("reward", "environment")
class EnvironmentReward(Part):
    """The sum of what the environment gave for each turn (`task.environment`)."""

    harmless = True

    def __call__(self, rollout: Rollout) -> Verdict:
        if rollout.turn_rewards is None:
            return Unscorable("the environment gave no reward for any turn")
        return sum(rollout.turn_rewards)
