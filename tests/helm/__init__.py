"""Tests of the Helm chart: Helm renders it, and the manifests are checked against Kubernetes and the design."""

import os

# Helm is a Go library, which reads this when it is loaded. By default it would collect garbage at every few megabytes of
# templates: a fifth of the time of these tests.
os.environ.setdefault("GOGC", "800")
