"""gRPC: one server builder, one way to call, one table from domain errors to status codes."""
