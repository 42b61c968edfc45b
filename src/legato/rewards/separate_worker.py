"""The other side of `separate.py`: imports the user's reward and calls it, as it runs in a worker (`workers/pool.py`)."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from legato.core.importing import make_imported
from legato.core.rollout import Unscorable
from legato.rewards.scoring import judge_all
from legato.rewards.separate import rollout_from_json


@lru_cache(maxsize=16)
def _reward(path: str, options: str) -> Any:
    return make_imported("reward", path, json.loads(options))


def judge(path: str, options: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | str]:
    """A breakdown for each rollout, or the reason why it could not be scored."""
    verdicts = judge_all(_reward(path, json.dumps(options)), [rollout_from_json(record) for record in rollouts])
    return [verdict.reason if isinstance(verdict, Unscorable) else verdict for verdict in verdicts]
