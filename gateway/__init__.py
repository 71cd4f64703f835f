"""The gateway: a REST API for runs, and the dashboard, which is a client of this API."""
