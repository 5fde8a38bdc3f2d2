"""The actor that owns the target model, its KV and the committed tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.process.actor_thread import ActorThread
from actors.process.process_logging import configure_logging
from actors.process.quick_imports import quick_imports
from actors.settings import PairSettings

if TYPE_CHECKING:  # a second to import, for processes that may never call a deployment
    from ray.serve.handle import DeploymentHandle


class TargetActor:
    """Loads the target in the background and serves the pair's shell over a socket in `folder`.

    Ray restarts it after a death with its settings alone: requests are lost here, and continued by the ingress, which
    holds their committed tokens. It calls the `Prefill` deployment itself, where there is one: KV blocks pass neither
    the shell nor a socket.
    """

    def __init__(self, settings: PairSettings, folder: Path, prefill: DeploymentHandle[Any] | None) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._prefill = prefill
        self._thread = ActorThread("TargetActor", self._serve, settings.niceness)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens.

        Raises:
            ConfigError: the model, its head, the pool or the limits do not fit.
        """
        self._thread.wait_ready(self._settings.start_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Here and not above: this class is known to shells and to Serve's builder, which must not load torch for it.
        with quick_imports():
            from actors.target.target_process import serve_target

        serve_target(self._settings, self._folder, self._prefill, is_ready)
