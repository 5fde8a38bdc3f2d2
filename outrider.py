"""The name of the application in deploy.yaml: `import_path: outrider:build`, the same as `cluster.app:build`."""

from cluster.app import build

__all__ = ["build"]
