"""Obstacles to a deployment, found before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import ssl
from collections.abc import Callable, Mapping
from importlib.metadata import version
from tempfile import TemporaryFile
from typing import Any

import psutil

from cluster.checkpoints import (
    check_models,
    convert_gguf_models,
    gpu_weight_bytes,
    resolve_model_path,
    weight_bytes,
)
from cluster.config import DeployConfig
from cluster.deploy_file import DeployFile
from cluster.local.serve_environment import is_free
from cluster.planning.roofline import ModelShape
from cluster.replica_settings import draft_cache_config
from cluster.schema.replicas import IngressSection
from cluster.topology import NodeTopology, read_topology
from engine.config import GIB, MAX_LOG_BYTES, CacheConfig, KVDtype, ModelDtype, Quantization
from engine.model.checkpoint.node_memory import available_bytes
from protos.errors import ConfigError
from router.api_keys import ApiKeys
from router.generation.receipts import read_private_key
from router.tokenizer.chat_template import ChatTemplate

_NO_WORD = re.compile(r"""[\s"'\\#$]""")
_RAY_BYTES = int(1.5 * GIB)  # idle cluster, controller, proxy and ingress
_PROCESS_BYTES = int(0.45 * GIB)  # Python with torch, of shell, target and draft each
_LOADING_FACTORS = {  # of bfloat16: packed weights and embeddings, or float32 of it
    Quantization.NONE: 2.0,
    Quantization.INT8: 0.75,
    Quantization.INT4: 0.5,
}
_GPU_PROCESS_BYTES = 2 * GIB  # Python with torch and a CUDA context
_CONTEXT_BYTES = GIB  # of a GPU: context, libraries' workspaces, the smallest passes


def check_ports(file: DeployFile) -> None:
    """Raise ConfigError for a taken port; the message names the port, its key and the process that holds it."""
    for port, key in ((file.http_port, "http_options"), (file.grpc_port, "grpc_options")):
        if port is not None and not is_free(file.http_host, port):
            raise ConfigError(
                f"port {port} is taken by {_holder(port)}; stop it, or change {key}.port in deploy.yaml, "
                "or --port and --grpc-port (an Outrider that runs already stops with Ctrl-C, or with `serve shutdown`)"
            )


def check_files(config: DeployConfig, report: Callable[[str], None]) -> DeployConfig:
    """Log notes for the operator, and return `config` with GGUF files converted.

    Every file that replicas read is checked, except the values of weights.

    Raises:
        ConfigError: a model is missing or unreadable, so are keys, certificates or a template, or the disk has too
            little room for a log.
    """
    config = convert_gguf_models(config, report)
    for note in check_models(config):
        report(f"note: {note}")
    ApiKeys(config.ingress.api_keys_file)
    if config.ingress.receipt_key_file is not None:
        read_private_key(config.ingress.receipt_key_file)
    check_certificates(config.ingress)
    if (template := config.ingress.chat_template_text) is not None:
        ChatTemplate(template, {})
    check_log(config)
    return config


def check_certificates(section: IngressSection) -> None:
    """Raise ConfigError for files that TLS cannot use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files: dict[str, tuple[Callable[[str], None], str]] = {
        "tls_certificate_file": (
            lambda path: context.load_cert_chain(path, password=lambda: ""),
            "certificates, the server's first, and its key without a password",
        ),
        "tls_client_ca_file": (context.load_verify_locations, "the certificates of authorities"),
    }
    for key, (load, contents) in files.items():
        if (path := getattr(section, key)) is None:
            continue
        if _NO_WORD.search(path):
            raise ConfigError(f"ingress.{key} {path!r} has a space or a character that HAProxy cannot read; rename it")
        try:
            load(os.path.expanduser(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ingress.{key} {path!r} cannot be used for TLS: {error}; it must hold {contents} (PEM)"
            ) from None


def check_log(config: DeployConfig) -> None:
    """Create the folder of the log that drafts are tuned on; raise ConfigError if it or its disk space is missing."""
    folder = config.tune.folder
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.iterdir())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tune.log {str(folder)!r} cannot be used: {error}; give another folder") from error
    if free < MAX_LOG_BYTES:
        raise ConfigError(
            f"the disk of tune.log {str(folder)!r} has {free / GIB:.2f} GiB for it, and the log grows to "
            f"{MAX_LOG_BYTES / GIB:g} GiB; free some, or give a folder on another disk"
        )


def check_logs_folders(deployment: Mapping[str, Any]) -> None:
    """Raise ConfigError for a `logs_dir` that replicas cannot write to: none would start.

    A missing folder is created, as Serve does.
    """
    applications = deployment["applications"]
    parts = [deployment, *applications, *(each for app in applications for each in app.get("deployments") or ())]
    for folder in ((part.get("logging_config") or {}).get("logs_dir") for part in parts):
        if folder is None:
            continue
        try:
            if not os.path.isabs(folder):
                raise ValueError("it is a relative path, and each process has its own folder")
            os.makedirs(folder, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"logging_config.logs_dir {folder!r} cannot be used: {error}; give another folder, or remove it"
            ) from error


def check_memory(config: DeployConfig, topology: NodeTopology | None = None) -> None:
    """Raise ConfigError if models, caches and Ray need more memory than this machine and each GPU have.

    With GPUs in `topology` (by default this machine's) weights and caches are on the GPUs, and memory here holds one
    checkpoint at a time. If this machine has no GPU, pairs that demand GPUs are for another one and are not checked.
    """
    if topology is None:
        topology = NodeTopology() if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else read_topology()
    check_driver(topology)
    if config.pair.gpus is not None and not topology.devices:
        return
    check_gpu_memory(config, topology, config.pair.max_replicas, os.environ.get("CUDA_VISIBLE_DEVICES"))
    pairs, prefills = config.pair.max_replicas, config.prefill.max_replicas
    per_pair, per_prefill = replica_bytes(config, is_on_gpu=bool(topology.devices))
    needed = _RAY_BYTES + pairs * per_pair + prefills * per_prefill
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"about {needed / GIB:.1f} GiB of memory are needed and {available / GIB:.1f} GiB are available; "
            f"lower {memory_remedy(is_on_gpu=bool(topology.devices))}, or stop other programs"
        )


def memory_remedy(*, is_on_gpu: bool) -> str:
    """Return the keys that lower the memory of a deployment."""
    return "pair.num_replicas" if is_on_gpu else "cache.memory_gib or pair.num_replicas"


def replica_bytes(config: DeployConfig, *, is_on_gpu: bool) -> tuple[int, int]:
    """Return the main memory of a pair and of a prefill replica."""
    return _host_bytes(config) if is_on_gpu else (_pair_bytes(config), _prefill_bytes(config))


def check_gpus(config: DeployConfig, topology: NodeTopology | None = None) -> None:
    """Raise ConfigError if this machine lacks the GPUs that pairs demand, or cores for them.

    It never gets another node, so the pairs would wait for ever.
    """
    demand = config.pair.gpus
    if demand is None:
        return
    topology = read_topology() if topology is None else topology
    num_ranks = config.target.tensor_parallel_size
    needed = config.pair.max_replicas * demand.count + config.prefill.max_replicas * num_ranks
    if needed > len(topology.devices):
        raise ConfigError(
            f"pair.gpus and prefill demand {needed} GPUs, and this machine has {len(topology.devices)}; deploy to a "
            f"cluster by `serve deploy`, where replicas wait for nodes, or lower the demand (seen: {topology})"
        )
    num_cores = needed * config.cores_per_gpu
    if num_cores > (available := os.cpu_count() or 1):
        raise ConfigError(
            f"{needed} GPUs with {config.cores_per_gpu} cores each need {num_cores} cores, and this machine has "
            f"{available}; set target.num_threads, the cores of each, for instance by --set target.num_threads=1"
        )


def check_driver(topology: NodeTopology, torch_version: str | None = None) -> None:
    """Raise ConfigError if the GPUs' driver is older than the CUDA that torch was built for.

    `torch_version` looks like "2.11.0+cu130" and is the installed one by default. A torch without CUDA passes here;
    models that get a GPU refuse it.
    """
    if not topology.devices:
        return
    built = torch_version or version("torch")
    found = re.search(r"\+cu(\d+)\d$", built)
    if found and topology.cuda_version is not None and topology.cuda_version[0] < int(found[1]):
        have = ".".join(map(str, topology.cuda_version))
        raise ConfigError(
            f"the NVIDIA driver runs CUDA up to {have}, and torch {built} needs {found[1]}.0 or later; update the "
            f"driver, or install a torch built for CUDA {topology.cuda_version[0]}"
        )


def check_gpu_memory(config: DeployConfig, topology: NodeTopology, num_pairs: int, visible: str | None = None) -> None:
    """Raise ConfigError if a GPU cannot hold its rank's weights, its draft's weights and a pool of a set size.

    `num_pairs` get GPUs in the order of `visible` (as CUDA_VISIBLE_DEVICES, by default all), each the target's first.
    """
    memory = topology.memory_of(visible)
    if not memory:
        return
    num_ranks = config.target.tensor_parallel_size
    # GPUs follow each other by pair: the ranks of the target, then the draft's own, if it has one.
    shares = not config.draft_paths or _shares_gpu(config, len(memory) // max(1, num_pairs))
    per_pair = num_ranks if shares else num_ranks + 1
    places = [index for index in range(min(len(memory), num_pairs * per_pair)) if index % per_pair < num_ranks]
    pool = 0 if config.cache.is_measured else (config.cache.to_engine().memory_bytes or 0) // num_ranks
    drafts = sum(gpu_weight_bytes(path, config.draft.quantization) for path in config.draft_paths)
    parts = {
        "weights": gpu_weight_bytes(config.target.path, config.target.quantization, num_ranks),
        "draft": drafts if shares else 0,
        "KV pool": pool,
    }
    remedy = f"raise target.tensor_parallel_size (now {num_ranks}) or lower cache.memory_gib (seen: {topology})"
    _check_gpu(
        f"each GPU of a {'pair' if shares else 'target'}", min(memory[place] for place in places), parts, config, remedy
    )
    # The draft's own GPU holds its weights; its pool takes the rest.
    own = [memory[place] for place in range(num_ranks, min(len(memory), num_pairs * per_pair), per_pair)]
    if not shares and own:
        remedy = f"give it a larger one, or set draft.gpu to 0, the target's (seen: {topology})"
        _check_gpu("the draft's GPU", min(own), {"weights": drafts}, config, remedy)


def _shares_gpu(config: DeployConfig, gpus_per_pair: int) -> bool:
    """True if the draft model computes on a GPU of the target."""
    draft = config.draft
    is_asked = isinstance(draft.gpu, int)
    return is_asked or (draft.gpu != "own" and gpus_per_pair <= config.target.tensor_parallel_size)


def _check_gpu(whose: str, memory: int, parts: dict[str, int], config: DeployConfig, remedy: str) -> None:
    limit = int(config.cache.gpu_memory_utilization * memory)
    needed = sum(parts.values()) + _CONTEXT_BYTES
    if needed > limit:
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        raise ConfigError(
            f"{whose} needs about {needed / GIB:.1f} GiB ({listed}, CUDA's own {_CONTEXT_BYTES / GIB:.1f}), and "
            f"{config.cache.gpu_memory_utilization:.2f} (cache.gpu_memory_utilization) of the smallest one's "
            f"{memory / GIB:.1f} GiB are {limit / GIB:.1f}; {remedy}"
        )


def _host_bytes(config: DeployConfig) -> tuple[int, int]:
    """Return the main memory of a pair and of a prefill replica whose weights and caches are on GPUs."""
    num_ranks = config.target.tensor_parallel_size
    target = weight_bytes(config.target.path) + num_ranks * _GPU_PROCESS_BYTES  # ranks map the same files
    drafts = sum(weight_bytes(path) + _GPU_PROCESS_BYTES for path in config.draft_paths)
    return target + drafts + _PROCESS_BYTES, target


def _pair_bytes(config: DeployConfig) -> int:
    # Every rank of a target reads all of its weights before it keeps its part.
    num_ranks = config.target.tensor_parallel_size
    weights = num_ranks * _loaded_bytes(config.target.path, config.target.quantization)
    weights += sum(_loaded_bytes(path, config.draft.quantization) for path in config.draft_paths)
    caches = _pool_bytes(config.cache.to_engine(), config.target.path, config.target.dtype)
    for path in config.draft_models.values():
        caches += _pool_bytes(draft_cache_config(config.cache), path, config.draft.dtype)
    return weights + caches + (1 + num_ranks + len(config.draft_paths)) * _PROCESS_BYTES


def _loaded_bytes(path: str, quantization: Quantization) -> int:
    return int(_LOADING_FACTORS[quantization] * weight_bytes(path))


def _prefill_bytes(config: DeployConfig) -> int:
    rank = _loaded_bytes(config.target.path, config.target.quantization) + _PROCESS_BYTES
    pool = _pool_bytes(config.cache.to_engine(), config.target.path, config.target.dtype)
    return config.target.tensor_parallel_size * rank + pool


def _pool_bytes(cache: CacheConfig, path: str, dtype: ModelDtype) -> int:
    """Return the bytes of a full KV pool; the size of a block follows from the model's shape.

    Return 0 if config.json does not have the shape under Llama's names. The start knows the model and checks again.
    """
    if cache.num_blocks is None:
        return cache.memory_bytes or 0
    folder = resolve_model_path(path)
    try:
        shape = ModelShape.of(folder, "float32" if dtype is ModelDtype.FLOAT32 else "bf16")
    except ConfigError:
        return 0
    whole = shape.cached_bytes(has_latents=True)  # at least
    bytes_per_token = whole if cache.dtype is KVDtype.AUTO else whole / shape.bytes_per_weight
    return int(cache.num_blocks * cache.block_size * bytes_per_token)


def _holder(port: int) -> str:
    """Name the process that listens on a port, as far as this user may know."""
    try:
        connections: list[Any] = psutil.net_connections("inet")
    except psutil.AccessDenied:
        return "another process"
    listening = (each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr)
    for pid in {each.pid for each in listening if each.laddr.port == port and each.pid}:
        try:
            return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
        except psutil.Error:
            continue
    return "another process"
