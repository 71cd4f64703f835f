"""The gateway: what a run is and does as a REST API, and the dashboard that is a client of it."""
