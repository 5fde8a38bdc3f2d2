"""A replica's view of its application, from Serve's controller."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus, ReplicaState

from router.backend import serve_backend
from router.backend.serve_backend import INGRESS, ApplicationWatch


class Controller:
    """Answers with whatever `word` is; None fails."""

    def __init__(self) -> None:
        self.word: Any = None
        self.num_asked = 0

    def say(self, status: ApplicationStatus, num_leaving: int = 0) -> None:
        states = {ReplicaState.RUNNING: 1, **({ReplicaState.STOPPING: num_leaving} if num_leaving else {})}
        deployments = {} if status == ApplicationStatus.DELETING else {INGRESS: SimpleNamespace(replica_states=states)}
        self.word = SimpleNamespace(status=status, deployments=deployments)

    def status(self) -> Any:
        self.num_asked += 1
        if self.word is None:
            raise RuntimeError("restarting")
        return SimpleNamespace(applications={"app": self.word})


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    fake = Controller()
    monkeypatch.setattr(serve, "status", fake.status)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(serve_backend, "_PERIOD_S", -1.0)  # ask each time
    return fake


async def test_an_application_is_deleted_when_the_controller_reports_so(controller: Controller) -> None:
    watch = ApplicationWatch()
    assert not await watch.is_deleted(), "nobody knows"
    controller.say(ApplicationStatus.DEPLOYING)
    assert not await watch.is_deleted()
    controller.say(ApplicationStatus.DELETING)
    assert await watch.is_deleted()


async def test_a_stay_is_over_when_one_more_replica_leaves_or_all_do(controller: Controller) -> None:
    watch = ApplicationWatch()
    controller.say(ApplicationStatus.RUNNING, num_leaving=2)
    is_over = watch.stay()
    answers = []
    for num_leaving in (2, 1, 1, 2):
        controller.say(ApplicationStatus.DEPLOYING, num_leaving)
        answers.append(await is_over())
    assert answers == [False, False, False, True]
    is_over = watch.stay()
    assert not await is_over(), "it began after they had left"
    controller.say(ApplicationStatus.DELETING)
    assert await is_over()
    assert await watch.stay()()


async def test_many_who_ask_at_once_cost_one_question(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_backend, "_PERIOD_S", 60.0)
    controller.say(ApplicationStatus.RUNNING)
    watch = ApplicationWatch()
    assert [await watch.is_deleted() for _ in range(5)] == [False] * 5
    assert controller.num_asked == 1


async def test_a_controller_that_hangs_takes_one_thread(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop's threads tokenize and render chats: on two cores there are six."""
    monkeypatch.setattr(serve_backend, "_ANSWER_TIMEOUT_S", 0.05)
    is_over, hanging = threading.Event(), []
    monkeypatch.setattr(serve, "status", lambda: (hanging.append(1), is_over.wait(20)))
    watch = ApplicationWatch()
    for _ in range(4):
        assert not await watch.is_deleted()
    assert len(hanging) == 1
    is_over.set()
