"""docker-compose.yml and its overlays: as files, and brought up."""
