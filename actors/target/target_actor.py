"""The actor that owns the target model, its KV and the committed tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.process.actor_thread import ActorThread, quick_imports
from actors.process.process_logging import configure_logging
from actors.settings import PairSettings
from engine.model.checkpoint.weight_files import begin_digests

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle


class TargetActor:
    """Loads the target in the background and serves the pair's shell over a socket in `folder`.

    After a death Ray restarts it with its settings alone. Its requests are lost; the ingress holds their committed
    tokens and continues them. It calls the `Prefill` deployment itself, if there is one, so that KV blocks do
    not pass through the shell or a socket.
    """

    def __init__(self, settings: PairSettings, folder: Path, prefill: DeploymentHandle[Any] | None) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._prefill = prefill
        self._thread = ActorThread("TargetActor", self._serve)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens.

        Raises:
            ConfigError: the model, its head, the pool or the limits do not fit.
        """
        self._thread.wait_ready(self._settings.start_timeout_s)

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Imported here: shells and Serve's builder import this class, and must not load torch for it.
        begin_digests(self._settings.engine.model.path)
        with quick_imports():
            from actors.target.target_process import serve_target

        serve_target(self._settings, self._folder, self._prefill, is_ready)
