"""Access control: tokens, allowed hosts and origins, rate limits, body size."""
