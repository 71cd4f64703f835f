"""Telemetry of every process: logs, Prometheus metrics, OpenTelemetry traces."""
