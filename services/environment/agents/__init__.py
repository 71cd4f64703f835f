"""The environment service of agents, which call the policy."""
