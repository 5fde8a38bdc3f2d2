"""The faults of `make chaos`: processes killed, stopped and late, memory filled, the clock moved, a redeploy."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import psutil

from tests.serve.chaos.interference import Orders
from tests.serve.chaos.world import Args, ChaosWorld

STOP_S = 8.0
LONG_STEP_S = 35.0  # longer than a stream waits for its pair, `router.backend.migration.SILENCE_S`
FILL_S = 6.0
CLOCK_SHIFT_S = 3600.0
UNNOTICED_S = 12.0  # an ingress that hangs gets requests until HAProxy's second check has failed
_NODE = "chaos_node"
_FACES = frozenset({"ingress", "HAProxy", "HAProxy's manager"})  # the clients' connections end with them
_STOPPED = ("target", "draft", "pair shell", "prefill replica", "index", "HAProxy's manager", "Serve controller")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `act` returns when the fault is over and every killed process is back.

    If the process holds clients' connections, open streams may break, and so may streams that begin within `breaks_s`
    seconds, before anything notices the fault. After a fault with `is_final` the operator restarts the application.
    After one with `has_other_texts` the application serves another model, with other texts.
    """

    name: str
    act: Callable[[ChaosWorld], None]
    breaks_s: float | None = None
    is_final: bool = False
    has_other_texts: bool = False


def _kill(kinds: tuple[str, ...], world: ChaosWorld) -> None:
    """Kill one process of each kind at once."""
    numbers = {kind: len(world.processes.of(kind)) for kind in kinds}
    victims = [world.processes.of(kind)[0] for kind in kinds]
    for victim in victims:
        victim.kill()
    world.struck_s = time.monotonic()
    for kind, victim in zip(kinds, victims, strict=True):
        world.eventually(partial(_has_ended, victim), f"{kind} ends")
    for kind, number in numbers.items():
        world.eventually(partial(_are_back, world, kind, number), f"{kind} is back")
    world.await_running()
    world.eventually(world.generates, "a request is answered")


def _are_back(world: ChaosWorld, kind: str, number: int) -> bool:
    return len(world.processes.of(kind)) >= number


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _stop(kind: str, world: ChaosWorld) -> None:
    processes = world.processes.of(kind)
    processes[0].suspend()
    world.struck_s = time.monotonic()
    time.sleep(STOP_S)
    with contextlib.suppress(psutil.Error):
        processes[0].resume()
    world.eventually(lambda: len(world.processes.of(kind)) >= len(processes), f"{kind} is back")
    world.eventually(world.generates, "a request is answered")


def _hang(kind: str, world: ChaosWorld) -> None:
    """Stop a process until it is replaced."""
    processes = world.processes.of(kind)
    processes[0].suspend()
    world.struck_s = time.monotonic()
    world.eventually(partial(_has_ended, processes[0]), f"{kind} that hangs is killed")
    world.eventually(partial(_are_back, world, kind, len(processes)), f"{kind} is back")
    world.await_running()
    world.eventually(world.generates, "a request is answered")


def _kill_gcs(world: ChaosWorld) -> None:
    """Kill the GCS, which has Ray's tables. Nothing restarts it here, and the raylet ends within a minute."""
    world.processes.of("GCS")[0].kill()
    time.sleep(STOP_S)


def _kill_raylet(world: ChaosWorld) -> None:
    """Kill the head's raylet: all of its workers end with it."""
    world.processes.of("raylet")[0].kill()
    time.sleep(1.0)


def _kill_second_raylet(world: ChaosWorld) -> None:
    """Put the prefill replica on a second node, and kill that node's raylet."""
    node = world.add_node(_NODE)
    override = {"name": "Prefill", "ray_actor_options": {"num_cpus": 0, "resources": {_NODE: 1}}}
    world.deploy(lambda args: None, [override])
    node.kill()
    time.sleep(STOP_S)
    world.eventually(world.generates, "a request is answered")
    world.deploy(lambda args: None)


def _fill_shared_memory(world: ChaosWorld) -> None:
    if not world.has_own_shared_memory:
        raise TimeoutError("not tried: /dev/shm is the machine's, since `unshare --mount` is not allowed here")
    path = world.shared_memory / "filling"
    try:
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\1" * (1 << 20))
        time.sleep(FILL_S)
    finally:
        path.unlink()
    world.eventually(world.generates, "a request is answered")


_HOLD = """
import sys, time, numpy, ray
ray.init(address=sys.argv[1], namespace="chaos", log_to_driver=False)
capacity = ray.cluster_resources()["object_store_memory"]
held = [ray.put(numpy.ones(32 << 20, dtype=numpy.uint8)) for _ in range(int(capacity * 0.95) >> 25)]
time.sleep(float(sys.argv[2]))
"""


def _fill_object_store(world: ChaosWorld) -> None:
    subprocess.run(
        [sys.executable, "-c", _HOLD, world.gcs_address(), str(FILL_S)],
        timeout=120,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    world.eventually(world.generates, "a request is answered")


def _interfere(orders: Callable[[ChaosWorld], Orders], seconds: float, world: ChaosWorld) -> None:
    world.interfere(orders(world))
    time.sleep(seconds)
    world.interfere(Orders())
    world.eventually(world.generates, "a request is answered")


def _long_step(world: ChaosWorld) -> Orders:
    pid = world.processes.of("target")[0].pid
    return Orders(stalled_pid=pid, stalled_until_s=time.monotonic() + LONG_STEP_S)


def _noise(world: ChaosWorld) -> Orders:
    return Orders(noisy_until_s=time.monotonic() + STOP_S)


def _clock(shift_s: float, world: ChaosWorld) -> Orders:
    return Orders(clock_shift_s=shift_s)


def _redeploy(change: Callable[[Args], None], world: ChaosWorld) -> None:
    world.deploy(change)
    world.eventually(world.generates, "a request is answered")


def _other_draft(args: Args) -> None:
    args["draft"] = {"kind": "suffix"}


def _other_number(args: Args) -> None:
    args["speculation"].update(num_tokens=1, adaptive=False)


def _one_pair(args: Args) -> None:
    args["pair"]["num_replicas"] = 1


def other_weights(args: Args) -> None:
    """Serve the demo's draft as the target: other texts, the same tokenizer."""
    args["target"]["path"] = "models/demo/draft"


_KILLED = (
    *((kind,) for kind in (*_STOPPED[:5], "ingress", "standby proxy", "HAProxy", *_STOPPED[5:])),
    *(("target", other) for other in ("draft", "pair shell", "index", "Serve controller")),
    ("HAProxy", "HAProxy's manager"),
)

FAULTS = [
    *(
        Fault(f"kill: {' and '.join(kinds)}", partial(_kill, kinds), None if _FACES.isdisjoint(kinds) else 0.0)
        for kinds in _KILLED
    ),
    *(
        Fault(f"stop {STOP_S:.0f} s: {kind}", partial(_stop, kind))
        for kind in (*_STOPPED, "ingress", "standby proxy", "HAProxy", "raylet")
    ),
    *(Fault(f"hang: {kind}", partial(_hang, kind)) for kind in ("target", "pair shell", "prefill replica")),
    Fault("hang: ingress", partial(_hang, "ingress"), breaks_s=UNNOTICED_S),
    Fault("kill: raylet of a second node, with the prefill replica", _kill_second_raylet),
    Fault(f"fill /dev/shm for {FILL_S:.0f} s", _fill_shared_memory),
    Fault(f"fill the object store for {FILL_S:.0f} s", _fill_object_store),
    Fault("clock an hour ahead, then right again", partial(_interfere, partial(_clock, CLOCK_SHIFT_S), STOP_S)),
    Fault("clock an hour back, then right again", partial(_interfere, partial(_clock, -CLOCK_SHIFT_S), STOP_S)),
    Fault(f"a step of {LONG_STEP_S:.0f} s", partial(_interfere, _long_step, LONG_STEP_S)),
    Fault(f"{STOP_S:.0f} s of channel and index messages lost, late, repeated", partial(_interfere, _noise, STOP_S)),
    Fault("redeploy: another draft", partial(_redeploy, _other_draft)),
    Fault("redeploy: another K", partial(_redeploy, _other_number)),
    Fault("redeploy: one pair", partial(_redeploy, _one_pair)),
    Fault("redeploy: the first settings, two pairs", partial(_redeploy, lambda args: None)),
    Fault("redeploy: other target weights", partial(_redeploy, other_weights), has_other_texts=True),
    Fault("redeploy: the first weights", partial(_redeploy, lambda args: None), has_other_texts=True),
    Fault("stop 8 s: GCS", partial(_stop, "GCS")),
    Fault("kill: GCS, then the operator restarts", _kill_gcs, breaks_s=inf, is_final=True),
    Fault("kill: the head's raylet, then the operator restarts", _kill_raylet, breaks_s=inf, is_final=True),
]
