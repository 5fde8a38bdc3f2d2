"""The options of Serve that our deployments honour; others are refused by name, with a replacement.

HAProxy ignores many options of Serve's own proxies. Others would undo our plan: the number of replicas sets the threads
of each, and Serve's router would replace ours. An option of an application may be set to its default. An option of a
deployment has no harmless value, because each replaces a part of our plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ray import serve
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from cluster.config import unknown_key

BUILDERS = ("cluster.app:build", "outrider:build")
DEPLOYMENTS = ("Ingress", "Pair", "Prefill")

_DEPLOYMENT = "applications.deployments"
_PREFIX = re.compile(r"/|(/[A-Za-z0-9._~-]+)+")  # it is part of HAProxy's rules
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")  # names of actors and processes have it between : and #
_LEAST = {"health_check_period_s": 0.1, "health_check_timeout_s": 1.0}  # below, a computing replica would count as dead
_SECTIONS = ("applications", "deployments")
HONOURED = frozenset(
    {
        *("proxy_location", "target_capacity", "controller_options.runtime_env"),
        *("http_options.host", "http_options.port"),
        *("grpc_options.port", "grpc_options.grpc_servicer_functions", "grpc_options.enable_reflection"),
        *(f"applications.{key}" for key in ("name", "route_prefix", "import_path", "runtime_env", "args")),
        *(f"{_DEPLOYMENT}.{key}" for key in ("name", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s")),
        *(f"{_DEPLOYMENT}.{key}" for key in ("health_check_period_s", "health_check_timeout_s")),
        *(f"{_DEPLOYMENT}.{key}" for key in ("rolling_update_percentage", "max_surge_percent")),
        *(f"{where}logging_config" for where in ("", "applications.", f"{_DEPLOYMENT}.")),
    }
)
INGRESS_ALONE = frozenset(  # it is one process, and takes no part in the placement of pairs
    {
        *(f"{_DEPLOYMENT}.ray_actor_options.{key}" for key in ("num_cpus", "memory", "resources", "label_selector")),
        f"{_DEPLOYMENT}.max_replicas_per_node",
    }
)
WITHOUT_RAY = frozenset(
    {
        *("http_options.host", "http_options.port", "grpc_options.port", "grpc_options.grpc_servicer_functions"),
        *("applications.name", "applications.import_path", "applications.args"),
    }
)
_TLS = "use ingress.tls_certificate_file"
_LIMITS = "ingress.limits bounds each wait for tokens"
_NUMBERS = "use pair.num_replicas or pair.autoscaling, prefill.*, ingress.num_replicas in args"
_QUEUE = "use scheduler.max_num_sequences and pair.max_queued_requests in args"
_PLACES = "use pair.gpus and pair.resources, prefill.resources in args"
_ROUTER = "use router in args"
REFUSED = {
    "http_options.root_path": "use the application's route_prefix",
    "http_options.request_timeout_s": _LIMITS,
    "http_options.keep_alive_timeout_s": "HAProxy closes idle connections by limits of its own (docs/security.md)",
    "http_options.ssl_keyfile": _TLS,
    "http_options.ssl_certfile": _TLS,
    "http_options.ssl_keyfile_password": _TLS,
    "http_options.ssl_ca_certs": "use ingress.tls_client_ca_file",
    "grpc_options.request_timeout_s": f"a call's own deadline holds, and {_LIMITS}",
    "tracing_config": "set OTEL_EXPORTER_OTLP_ENDPOINT (docs/operate.md)",
    "applications.host": "use http_options.host",
    "applications.port": "use http_options.port",
    "applications.autoscaling_policy": _NUMBERS,
    "applications.external_scaler_enabled": _NUMBERS,
    f"{_DEPLOYMENT}.num_replicas": _NUMBERS,
    f"{_DEPLOYMENT}.autoscaling_config": _NUMBERS,
    f"{_DEPLOYMENT}.max_ongoing_requests": _QUEUE,
    f"{_DEPLOYMENT}.max_queued_requests": _QUEUE,
    f"{_DEPLOYMENT}.backpressure_config": _QUEUE,
    f"{_DEPLOYMENT}.user_config": "use args: every setting is there",
    f"{_DEPLOYMENT}.ray_actor_options": _PLACES,
    f"{_DEPLOYMENT}.placement_group_bundles": _PLACES,
    f"{_DEPLOYMENT}.placement_group_strategy": _PLACES,
    f"{_DEPLOYMENT}.placement_group_bundle_label_selector": _PLACES,
    f"{_DEPLOYMENT}.max_replicas_per_node": _PLACES,
    f"{_DEPLOYMENT}.gang_scheduling_config": _PLACES,
    f"{_DEPLOYMENT}.request_router_config": _ROUTER,
    f"{_DEPLOYMENT}.deployment_actors": "targets and drafts are started by their pair",
}


def unknown_keys(
    section: Mapping[str, Any], schema: type[BaseModel] = ServeDeploySchema, where: str = ""
) -> Iterator[str]:
    """Yield keys, at any depth, that this version of Serve does not know and would ignore."""
    fields = {each.alias or name: each for name, each in schema.model_fields.items()}
    for key, value in section.items():
        if key not in fields:
            yield unknown_key(f"{where}{key}", str(key), list(fields))
        elif (inner := model_of(fields[key])) is not None:
            for number, part in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(part, Mapping):
                    yield from unknown_keys(part, inner, _place(where, key, part, number))


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the schema of a field's value, or of each of its values."""
    types = (each for each in _types(field.annotation) if isinstance(each, type))
    return next((each for each in types if issubclass(each, BaseModel)), None)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from _types(each)


def _place(where: str, key: str, part: Mapping[str, Any], number: int) -> str:
    if key in _SECTIONS:
        return f"{where}{key.removesuffix('s')} {part.get('name', number)!r}: "
    return f"{where}{key}."


def refusals(deployment: Mapping[str, Any], *, has_prefill: bool) -> Iterator[str]:
    """Yield options that we do not honour, unknown deployments, and a second application of ours."""
    yield from _refused(deployment, "", "", HONOURED)
    if deployment.get("proxy_location") == "Disabled":
        yield "proxy_location is 'Disabled', and no other server listens for clients; use EveryNode or HeadOnly"
    ours = [each for each in deployment["applications"] if each.get("import_path") in BUILDERS]
    if len(ours) > 1:
        names = " and ".join(repr(each.get("name", "default")) for each in ours)
        yield f"applications {names} are both of Outrider, and each takes all cores or GPUs of a cluster; keep one"
    existing = DEPLOYMENTS if has_prefill else DEPLOYMENTS[:2]
    for application in ours[:1]:
        yield from _refused(application, "applications", "", HONOURED)
        yield from _wrong_names(application)
        yield from _wrong_environment(application.get("runtime_env") or {})
        yield from _refused_deployments(application.get("deployments") or (), existing)


def refusals_without_ray(deployment: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of Serve that a server in one process does not honour."""
    parts = [("", deployment)]
    for application in deployment["applications"]:
        parts.append(("applications", application))
        parts += ((_DEPLOYMENT, each) for each in application.get("deployments") or ())
    for path, part in parts:
        for option, value in _set_options(part, _schema(path), path):
            if option not in WITHOUT_RAY:
                yield f"{option} is {value!r:.80}"
    if (number := len(deployment["applications"])) > 1:
        yield f"applications are {number}"


def _refused_deployments(deployments: Sequence[Mapping[str, Any]], existing: Sequence[str]) -> Iterator[str]:
    names = [str(each.get("name")) for each in deployments]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield f"deployment {twice!r} is there twice; make it one"
    for each, name in zip(deployments, names, strict=True):
        where = f"deployment {name!r}: "
        if name not in existing:
            close = difflib.get_close_matches(name, existing, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(existing)}"
            yield f"{where}there is no such deployment; {remedy}"
        yield from _refused(each, _DEPLOYMENT, where, HONOURED | (INGRESS_ALONE if name == "Ingress" else frozenset()))
        yield from (f"{where}{mistake}" for mistake in _wrong_values(each))


def _wrong_names(application: Mapping[str, Any]) -> Iterator[str]:
    prefix, name = application.get("route_prefix", "/"), str(application.get("name", "default"))
    if prefix is None:
        yield "route_prefix is null, and nothing would be served by HTTP; remove it, or use '/'"
    elif not _PREFIX.fullmatch(prefix):
        yield (
            f"route_prefix is {prefix!r}; it must be '/', or '/' and a name of letters, digits and ._~- "
            "(or several) without a '/' at the end"
        )
    if not _NAME.fullmatch(name):
        yield f"the application's name is {name!r:.120}; use 1 to 100 letters, digits and ._-"


def _wrong_environment(environment: Mapping[str, Any]) -> Iterator[str]:
    known = sorted(RuntimeEnv.known_fields)
    yield from (unknown_key(f"runtime_env.{key}", str(key), known) for key in environment if key not in known)
    try:
        RuntimeEnv(**{key: value for key, value in environment.items() if key in known})
    except (ValueError, TypeError) as error:
        yield f"runtime_env is not one that Ray accepts: {error}"


def _wrong_values(deployment: Mapping[str, Any]) -> Iterator[str]:
    """Yield values that make Serve start no replica, or end every replica."""
    for key, least in _LEAST.items():
        value = deployment.get(key)
        if isinstance(value, float | int) and value < least:
            yield f"{key} is {value}, too short for a replica that computes; use {least:g} or more"
    chosen = {key: deployment[key] for key in ("ray_actor_options", "max_replicas_per_node") if key in deployment}
    try:
        cast(serve.Deployment, serve.deployment(object)).options(**chosen)
    except (ValueError, TypeError) as error:
        yield f"Ray does not accept {' and '.join(chosen)}: {error}"


def _refused(section: Mapping[str, Any], path: str, where: str, honoured: frozenset[str]) -> Iterator[str]:
    for option, value in _set_options(section, _schema(path), path):
        if not any(f"{option}.".startswith(f"{each}.") for each in honoured):
            name = option.removeprefix(f"{path}.")
            yield f"{where}{name} is {value!r:.80}, which nothing here honours; {_remedy(option)}"


def _remedy(option: str) -> str:
    return next((text for path, text in REFUSED.items() if f"{option}.".startswith(f"{path}.")), "remove it")


def _set_options(section: Mapping[str, Any], schema: type[BaseModel], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each option that is set to something else than its default.

    Options of nested applications and deployments are left out: each is a section of its own.
    """
    for key, value in section.items():
        option, field = f"{path}.{key}" if path else key, schema.model_fields[key]
        inner = model_of(field)
        default = field.get_default(call_default_factory=True)
        if inner is not None and isinstance(value, Mapping):
            inside = list(_set_options(value, inner, option))
            yield from inside
            if not inside and not isinstance(default, BaseModel):  # an empty mapping counts as set
                yield option, value
        elif key not in _SECTIONS and value != default:
            yield option, value


def _schema(path: str) -> type[BaseModel]:
    schema: type[BaseModel] = ServeDeploySchema
    for key in filter(None, path.split(".")):
        found = model_of(schema.model_fields[key])
        assert found is not None, "applications and deployments have schemas"
        schema = found
    return schema
