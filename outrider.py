"""The name of the application in deploy.yaml: `import_path: outrider:build`, the same as `cluster.app:build`."""

from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent
_PACKAGES = ("actors", "cluster", "engine", "protos", "router")


def _refuse_hidden() -> None:
    """Raise ImportError where another folder of the same name, of a Ray `working_dir`, comes before a package of ours.

    Ours never comes before the user's: Ray puts `working_dir` first on the path.
    """
    for name in _PACKAGES:
        spec = find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or name])
        if str(_HOME / name) not in [str(Path(place).resolve()) for place in places]:
            raise ImportError(
                f"{name!r} is {places[0] if places else 'nowhere'}, and Outrider's is {_HOME / name}: rename that "
                "folder of the working_dir, or deploy Outrider without it, as an application of its own runtime_env"
            )


_refuse_hidden()

from cluster.app import build  # noqa: E402  # behind the check, whose reason is clearer than a missing module's

__all__ = ["build"]
