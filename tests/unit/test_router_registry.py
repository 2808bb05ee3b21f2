"""Leases, expiry, drain and quarantine of workers, against a clock that the test moves."""

import pytest
from headwater_router.registry import Registry

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import InvalidArgument, NotFound
from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1.router_pb2 import DrainWorkerRequest, RegisterWorkerRequest, WorkerReport


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def report(step=0, state=WorkerState.WORKER_STATE_READY, run_id="run"):
    return WorkerReport(state=state, weight_version=WeightVersion(run_id=run_id, step=step))


def registration(worker_id="w1", **fields):
    return RegisterWorkerRequest(
        worker_id=worker_id, address="127.0.0.1:1", capacity_groups=2, report=report(), **fields
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return Registry(expiry_s=5, clock=clock)


def test_a_silent_worker_expires_and_its_lease_is_unknown_afterwards(registry, clock):
    worker = registry.register(registration())
    clock.now += 4.9
    registry.expire()
    assert list(registry) == [worker]
    clock.now += 0.1
    registry.expire()
    assert list(registry) == []
    assert worker.lost.is_set()
    with pytest.raises(NotFound, match="register again"):
        registry.heartbeat(worker.lease_id, report())


def test_a_heartbeat_renews_the_lease(registry, clock):
    worker = registry.register(registration())
    clock.now += 4
    registry.heartbeat(worker.lease_id, report(step=3))
    clock.now += 4
    registry.expire()
    assert list(registry) == [worker]
    assert worker.report.weight_version.step == 3


def test_registering_again_replaces_the_worker_and_ends_its_old_lease(registry):
    lost = []
    registry.on_lost = lost.append
    old = registry.register(registration())
    new = registry.register(registration())
    assert list(registry) == [new]
    assert lost == [old]
    assert old.lost.is_set()
    assert not new.lost.is_set()
    registry.deregister(old.lease_id)  # late, and no longer about the worker of that id
    assert list(registry) == [new]


def test_an_expired_worker_comes_back_by_registering(registry, clock):
    registry.register(registration())
    clock.now += 6
    registry.expire()
    assert [worker.blocked() for worker in [registry.register(registration())]] == [""]


@pytest.mark.parametrize("state", [s for s in WorkerState.values() if s != WorkerState.WORKER_STATE_READY])
def test_only_a_ready_worker_accepts(registry, state):
    worker = registry.register(registration())
    assert worker.blocked() == ""
    registry.heartbeat(worker.lease_id, report(state=state))
    assert WorkerState.Name(state).removeprefix("WORKER_STATE_") in worker.blocked()


def test_a_drained_worker_stays_out_whatever_it_reports(registry):
    worker = registry.register(registration())
    registry.drain(DrainWorkerRequest(worker_id="w1", reason="maintenance"))
    registry.heartbeat(worker.lease_id, report(step=9))
    assert "maintenance" in worker.blocked()


def test_a_quarantine_ends_with_newer_weights_only(registry):
    worker = registry.register(registration())
    registry.heartbeat(worker.lease_id, report(step=4))
    registry.drain(DrainWorkerRequest(worker_id="w1", quarantine=True, reason="bad fingerprint"))
    registry.heartbeat(worker.lease_id, report(step=4))
    assert "bad fingerprint" in worker.blocked()
    registry.heartbeat(worker.lease_id, report(step=5))
    assert worker.blocked() == ""


def test_a_quarantine_survives_a_new_registration_with_the_same_weights(registry):
    registry.register(registration())
    registry.drain(DrainWorkerRequest(worker_id="w1", quarantine=True, reason="bad fingerprint"))
    assert "bad fingerprint" in registry.register(registration()).blocked()


def test_a_suspended_worker_accepts_again_after_its_next_heartbeat(registry):
    worker = registry.register(registration())
    registry.suspend(worker, "connection refused")
    assert "connection refused" in worker.blocked()
    registry.heartbeat(worker.lease_id, report())
    assert worker.blocked() == ""


def test_draining_an_unknown_worker_names_those_that_exist(registry):
    registry.register(registration())
    with pytest.raises(NotFound, match="w1"):
        registry.drain(DrainWorkerRequest(worker_id="nobody"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"address": "nowhere"}, "address"),
        ({"address": ":1"}, "address"),
        ({"capacity_groups": 0}, "capacity_groups"),
    ],
)
def test_a_malformed_registration_names_the_field(registry, fields, field):
    request = registration()
    for name, value in fields.items():
        setattr(request, name, value)
    with pytest.raises(InvalidArgument) as caught:
        registry.register(request)
    assert caught.value.field == field
