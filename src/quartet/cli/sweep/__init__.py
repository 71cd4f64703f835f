"""`quartet sweep`: runs over a grid of settings and seeds."""
