"""The Helm chart, rendered by Helm itself and held to what Kubernetes and the design ask for."""
