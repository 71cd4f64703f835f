"""Tests of the Helm chart: Helm renders it, and the manifests are checked against Kubernetes and the design."""
