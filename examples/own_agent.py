"""An agent that owns its loop: it keeps its own text, decides when to ask again, and returns rewards (docs/environments.md).

legato train recipes/tiny-guess.toml task.environment=examples/own_agent.py:play task.environment_options.guesses=2

A run serves its engine to the agent and records each request token by token, so that the agent may be any program: this one
needs no library, yours may hand `endpoint.base_url` and `endpoint.api_key` to OpenAI's client.
"""

from legato.core.rollout import Problem
from legato.environments.agents import Endpoint


def play(problem: Problem, endpoint: Endpoint, guesses: int = 2) -> list[float]:
    """Find the secret number: the rewards of the guesses, 1 for the one that finds it."""
    secret, text, rewards = int(problem.answer or 0), str(problem.prompt), list[float]()
    for _ in range(guesses):
        answer = endpoint.ask("/completions", prompt=text, max_tokens=8)
        word = answer["choices"][0]["text"]
        guess = int(word) if word.strip().isascii() and word.strip().isdigit() else None
        rewards.append(float(guess == secret))
        if guess == secret:
            break
        hint = "a number:" if guess is None else "more:" if guess < secret else "less:"
        text += word + hint
    return rewards
