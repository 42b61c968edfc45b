"""Environments: tools for the policy, games, and adapters to environments written for TRL and verifiers."""
