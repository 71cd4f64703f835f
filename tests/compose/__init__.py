"""Tests of docker-compose.yml and its overlays, as files and as a running stack."""
