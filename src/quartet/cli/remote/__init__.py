"""Commands for an active run, sent to its gateway over HTTP."""
