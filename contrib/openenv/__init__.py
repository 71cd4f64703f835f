"""Environments of OpenEnv servers, over HTTP and over WebSocket."""
