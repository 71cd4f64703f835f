"""Verifiable rewards: functions that check a response by rule, and the sandbox that runs programs for them."""
