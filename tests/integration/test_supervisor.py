"""The supervisor with real processes: Valkey, and small Python programs that misbehave on purpose."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import redis

from headwater.errors import FailedPrecondition, InvalidArgument, Unavailable
from headwater.rpc.health import serves
from headwater.supervisor.checks import check_ports_free, check_redis
from headwater.supervisor.process import ServiceSpec
from headwater.supervisor.proctree import descendants
from headwater.supervisor.supervisor import Supervisor
from headwater.supervisor.valkey import valkey_spec


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def program(name: str, code: str, ready=lambda: True, **options) -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, "-c", textwrap.dedent(code)), "127.0.0.1:1", ready, **options)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def test_valkey_starts_keeps_data_and_binds_loopback(tmp_path):
    port = free_port()
    for expected in (None, b"kept"):
        with Supervisor(tmp_path) as supervisor:
            supervisor.wait_ready([supervisor.start(valkey_spec(tmp_path / "valkey", port))])
            client = redis.Redis(port=port)
            assert client.get("key") == expected
            client.set("key", "kept")
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert not serves(f"127.0.0.1:{port}", 0.2)


def test_a_service_that_ends_while_it_starts_is_an_error_with_the_logs_tail(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(program("broken", "import sys; sys.exit('no such model')", ready=lambda: False))
        with pytest.raises(Unavailable, match=r"broken ended with exit code 1(?s:.*)no such model"):
            supervisor.wait_ready([child])


def test_a_service_that_never_serves_is_an_error_after_its_deadline(tmp_path):
    spec = program("slow", "import time; time.sleep(60)", ready=lambda: False, ready_timeout_s=0.5)
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(spec)
        with pytest.raises(Unavailable, match="does not serve after 0 s"):
            supervisor.wait_ready([child])
    assert not running(child.pid)


def test_services_stop_in_reverse_order(tmp_path):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "a").write(sys.argv[2]), sys.exit(0)))
        print("up", flush=True)
        time.sleep(60)
    """
    order = tmp_path / "order"
    with Supervisor(tmp_path) as supervisor:
        for name in "abc":
            spec = program(name, code)
            child = supervisor.start(ServiceSpec(name, (*spec.command, str(order), name), "", lambda: True))
            wait_until(lambda child=child: "up" in child.log_tail())
    assert order.read_text() == "cba"


def test_a_service_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path):
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print("up", flush=True)
        time.sleep(60)
    """
    echoed: list[str] = []
    with Supervisor(tmp_path, echoed.append) as supervisor:
        child = supervisor.start(program("stubborn", code, stop_grace_s=0.3))
        wait_until(lambda: "up" in child.log_tail())
        family = [proc.pid for proc in descendants(child.pid)]
        assert len(family) == 1
    wait_until(lambda: not any(running(pid) for pid in [child.pid, *family]))  # SIGKILL takes effect a moment later
    assert "stubborn did not stop" in echoed[-1]


def test_no_service_outlives_a_killed_supervisor(tmp_path):
    code = f"""
        import sys, time
        from pathlib import Path
        from headwater.supervisor.process import ServiceSpec
        from headwater.supervisor.supervisor import Supervisor
        supervisor = Supervisor(Path({str(tmp_path)!r}))
        loop = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
        child = supervisor.start(ServiceSpec("s", loop, "", bool))
        while "up" not in child.log_tail():
            time.sleep(0.05)
        print(child.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert running(pid)
    parent.kill()
    parent.wait(5)
    parent.stdout.close()
    wait_until(lambda: not running(pid))


def test_a_dead_service_is_reported_once_with_the_command_and_again_when_it_is_back(tmp_path):
    port = free_port()
    echoed: list[str] = []
    with Supervisor(tmp_path, echoed.append) as supervisor:
        spec = valkey_spec(tmp_path / "valkey", port)
        child = supervisor.start(spec)
        supervisor.wait_ready([child])
        supervisor.check()
        assert echoed == []
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: child.exit_code() is not None)
        supervisor.check()
        supervisor.check()
        assert len(echoed) == 1
        assert "signal 9" in echoed[0]
        assert spec.restart_command() in echoed[0]
        again = subprocess.Popen(["bash", "-c", f"exec {spec.restart_command()}"], stdout=subprocess.DEVNULL)
        try:
            wait_until(spec.ready)
            supervisor.check()
            supervisor.check()
            assert echoed[1:] == [f"valkey (127.0.0.1:{port}) is back"]
        finally:
            again.terminate()
            again.wait(10)
        supervisor.check()
        assert len(echoed) == 3


def test_warnings_in_a_log_are_repeated(tmp_path):
    code = "print('2026-01-01T00:00:00Z WARNING reward queue is full\\nplain', flush=True); import time; time.sleep(60)"
    echoed: list[str] = []
    with Supervisor(tmp_path, echoed.append) as supervisor:
        supervisor.start(program("reward", code))
        wait_until(lambda: echoed)
    assert echoed == ["[reward] 2026-01-01T00:00:00Z WARNING reward queue is full"]


def test_a_run_folder_has_one_supervisor(tmp_path):
    with Supervisor(tmp_path), pytest.raises(FailedPrecondition, match=f"in use by process {os.getpid()}"):
        Supervisor(tmp_path)
    Supervisor(tmp_path).stop()


def test_a_taken_port_names_port_base():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"port {port} \\(router\\) is in use.*--port-base") as e:
            check_ports_free({"router": port}, port)
    assert e.value.field == "port_base"


def test_an_unreachable_or_malformed_redis_is_a_clear_error_within_seconds():
    began = time.monotonic()
    with pytest.raises(Unavailable, match="does not answer") as e:
        check_redis(f"redis://127.0.0.1:{free_port()}/0")
    assert e.value.field == "redis"
    with pytest.raises(InvalidArgument, match="is wrong"):
        check_redis("127.0.0.1:6379")
    assert time.monotonic() - began < 5
