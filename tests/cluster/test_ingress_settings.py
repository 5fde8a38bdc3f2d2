"""Every setting of the frontends arrives in an ingress replica's configuration."""

from __future__ import annotations

from pathlib import Path

from cluster.config import parse_config
from cluster.replica_settings import ingress_config
from router.config import IngressConfig, IngressLimits


def test_each_setting_arrives(tmp_path: Path) -> None:
    """No setting keeps its default: a default would hide a setting that is lost on its way."""
    (tmp_path / "config.json").write_text("{}")
    limits = {"max_body_bytes": 2048}
    settings = {
        "model_aliases": ("first", "second"),
        "open_admin": True,
        "tool_format": "prompted",
        "reasoning_format": "think",
        "chat_template": "{{ messages }}",
        "strict_fields": True,
        "cors_origins": ("https://a.example",),
        "allowed_hosts": ("b.example",),
    }
    args = {
        "model_id": "model",
        "target": {"path": str(tmp_path)},
        "pair": {"num_replicas": 2},
        "ingress": {**settings, "limits": limits},
    }
    config = ingress_config(parse_config(args))
    assert config.limits == IngressLimits(**limits)
    assert {name: getattr(config, name) for name in settings} == settings
    assert (config.model_id, config.model_path) == ("model", str(tmp_path))
    unset = IngressConfig(model_id="", model_path="")
    left = {name for name in IngressConfig.model_fields if getattr(config, name) == getattr(unset, name)}
    assert left == {"api_keys_file", "receipt_key_file"}, "of this file alone open_admin is refused; below it arrives"
    assert not [name for name in limits if getattr(config.limits, name) == getattr(unset.limits, name)]
    keys = tmp_path / "keys"
    files = {"api_keys_file": str(keys), "receipt_key_file": str(tmp_path / "receipts.pem")}
    with_keys = ingress_config(parse_config({**args, "ingress": files}))
    assert {name: getattr(with_keys, name) for name in files} == files
