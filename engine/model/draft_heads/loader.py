"""Loading of a head by its configuration."""

from __future__ import annotations

from transformers import PreTrainedModel

from engine.config import HeadConfig, HeadKind
from engine.model.draft_heads.eagle3 import Eagle3Head, load_eagle3
from engine.model.draft_heads.medusa import MedusaHeads, load_medusa
from engine.model.draft_heads.mtp import MtpHead, load_mtp
from protos.errors import ConfigError

Head = MedusaHeads | Eagle3Head | MtpHead


def load_head(config: HeadConfig, target: PreTrainedModel) -> Head:
    """The head that `config` names, for `target` as transformers has loaded it, before its layers are taken over.

    Raises:
        ConfigError: it does not exist, is incomplete, or does not fit the target.
    """
    if config.kind is HeadKind.MTP:
        return load_mtp(target)
    assert config.kind is not HeadKind.SELF, "the runner makes it of its own model"
    if config.path is None:
        raise ConfigError(f"draft.kind {str(config.kind)!r} needs draft.path, the head's folder or Hub id")
    if config.kind is HeadKind.EAGLE3:
        return load_eagle3(config.path, target)
    return load_medusa(config.path, target)
