"""Sessions: the OpenAI protocol for agents, each with the key of one episode."""
