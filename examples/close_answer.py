"""A reward that reads a column of the data: an answer may be off by as much as its problem allows."""

from legato.core.rollout import Rollout


def close_answer(rollout: Rollout) -> float:
    """1 if the response is a whole number within `off_by` of the answer; else 0."""
    text, problem = rollout.text.strip(), rollout.problem
    if not text.isdecimal() or problem.answer is None:
        return 0.0
    return float(abs(int(text) - int(problem.answer)) <= problem.fields["off_by"])
