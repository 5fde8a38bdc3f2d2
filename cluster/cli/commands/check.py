"""`outrider check`: finds a deployment's mistakes without starting anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from cluster.checkpoints import resolve_model_path
from cluster.cli import report
from cluster.config import DeployConfig
from cluster.deploy_file import DeployFile, read_deploy_file
from cluster.preflight import check_files, check_logs_folders, check_memory
from cluster.replica_settings import unplaced_settings
from protos.errors import ConfigError
from router.tokenizer.chat_prompt import chat_prompt
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import load_chat_template


def check(
    deploy_file: Annotated[Path, Argument(metavar="deploy.yaml")],
    quality: Annotated[
        list[Path] | None,
        Option(metavar="TEXT", help="also measure the target's perplexity on this file; may be given more than once"),
    ] = None,
    full: Annotated[
        bool,
        Option("--full", help="also load the models and compare them with stock ones, as a first start does"),
    ] = False,
) -> None:
    """Check a deploy.yaml, its models and this machine's memory; start nothing."""
    file = check_deployment(read_deploy_file(deploy_file))
    _check_start(file.config)
    if full:
        _compare_models(file.config)
    default, *others = map(str, file.config.offered_methods)
    report(
        f"{deploy_file} is valid: model {file.config.model_id!r}, drafts by {default}; requests may choose "
        f"{', '.join(others)}"
    )
    if quality:
        _report_quality(file.config, quality)


def check_deployment(file: DeployFile) -> DeployFile:
    """Return `file` with GGUF files converted, after reporting notes for the operator.

    Raises:
        ConfigError: a model is missing or unreadable, keys are unreadable, memory or log space is too small, or a
            folder of Serve's logs cannot be used.
    """
    config = check_files(file.config, report)
    check_logs_folders(file.deployment)
    for rule in _template_rules(config):
        report(f"note: the chat template: {rule}")
    check_memory(config)
    return replace(file, config=config)


def _check_start(config: DeployConfig) -> None:
    # Imported here: it loads torch, which `outrider serve` must not do in this process.
    from actors.draft.draft_process import check_start

    for note in check_start(unplaced_settings(config), is_on_gpu=config.pair.gpus is not None):
        report(f"note: {note}")


def _compare_models(config: DeployConfig) -> None:
    """Repeat the comparison that later starts skip, on this machine's processor or GPU."""
    from engine.config import CacheConfig
    from engine.model.runner.model_runner import ModelRunner

    settings = unplaced_settings(config)
    drafts = [each.draft.model for each in settings.of_drafts.values()]
    for model in (settings.engine.model, *(draft for draft in drafts if draft is not None)):
        ModelRunner(model, CacheConfig(num_blocks=1), repeats_checks=True)
        report(f"{model.path} agrees with its stock model, quantization {model.quantization}")


def _template_rules(config: DeployConfig) -> list[str]:
    """Return the chat template's limits and how they are handled; empty for a model on the Hub."""
    folder = Path(resolve_model_path(config.target.path))
    own = config.ingress.chat_template_text
    if own is None and not folder.is_dir():
        return []
    template = load_chat_template(folder) if own is None else ChatTemplate(own, {})
    return [] if template is None else [str(rule) for rule in chat_prompt(template).rules]


def _report_quality(config: DeployConfig, files: list[Path]) -> None:
    from engine.model.runner.perplexity import measure_quality

    model = replace(config.to_engine().model, path=resolve_model_path(config.target.path))
    try:
        quality = measure_quality(model, [file.read_text(encoding="utf-8") for file in files])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--quality cannot read its text: {error}; give files of UTF-8 text") from error
    report(f"perplexity {quality.perplexity:.3f} on {quality.num_tokens} tokens, quantization {model.quantization}")
    if quality.full_perplexity is not None:
        excess = quality.perplexity / quality.full_perplexity - 1
        report(f"           {quality.full_perplexity:.3f} without quantization: {excess:+.2%}")
