"""The public names: `outrider:build`, the application of deploy.yaml, and `outrider.v1`, the gRPC stubs.

`build` is `cluster.app.build`, imported on first use: a client of the stubs needs no Ray.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.app import build as build

_HOME = Path(__file__).resolve().parents[1]
_PACKAGES = ("actors", "cluster", "engine", "protos", "router")


def _refuse_hidden() -> None:
    """Raise ImportError if a Ray `working_dir` has a folder with the name of one of our packages.

    Ray puts `working_dir` first on the path, so such a folder would hide our package.
    """
    for name in _PACKAGES:
        spec = find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or name])
        if str(_HOME / name) not in [str(Path(place).resolve()) for place in places]:
            raise ImportError(
                f"{name!r} is {places[0] if places else 'missing'}, but Outrider's is {_HOME / name}; rename that "
                "folder of the working_dir, or deploy Outrider as a separate application with its own runtime_env"
            )


_refuse_hidden()


def __getattr__(name: str) -> Any:
    if name != "build":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cluster.app import build

    return build
