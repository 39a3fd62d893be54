"""The contract of the backend: every operation against a plain reference computed from all ranks' inputs."""
