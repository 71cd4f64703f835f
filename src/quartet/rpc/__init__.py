"""gRPC: typed clients, the server of every process, errors on the wire, and access control."""
