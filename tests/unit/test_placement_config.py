"""The command line of `--placement ray`, and the one that it makes for each worker."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from headwater_rollout.__main__ import main
from headwater_rollout.config import RolloutConfig, parse_args
from headwater_rollout.placement.config import Placement, of_replica

RAY = ["--placement", "ray", "--ray-address", "10.0.0.1:6379", "--router", "10.0.0.2:7400"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "password").write_text("p@ss")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def placed(*flags: str) -> tuple[RolloutConfig, Placement]:
    config = parse_args([*RAY, *flags])
    assert config.placement is not None
    return config, config.placement


def worker(config: RolloutConfig, placement: Placement, index: int) -> RolloutConfig:
    """What worker `index` reads from the command line that it is given."""
    return parse_args(
        of_replica(
            placement.arguments, index=index, worker_id=f"w-{index}", bind=config.bind,
            metrics_bind=config.metrics_bind,
        )
    )  # fmt: skip


def test_a_worker_gets_every_setting_of_the_placing_process(folder):
    config, placement = placed(
        "--model", "model", "--bind", "0.0.0.0:7410", "--metrics-bind", "127.0.0.1:9400", "--reward", "a:1,b:2",
        "--engine", "diffusers", "--precision", "fp32", "--device", "cuda:0", "--redis", "redis://u@r:6379/1",
        "--redis-password-file", "password", "--blob-root", "blobs", "--max-group-size", "5", "--capacity-groups", "3",
        "--timeout-s", "7.5", "--drain-grace-s", "9", "--insecure", "--tls-ca", "ca.crt", "--tls-cert", "c.crt",
        "--tls-key", "c.key", "--token-file", "t", "--tokens", "tokens.toml",
    )  # fmt: skip
    got = worker(config, placement, 2)
    files = {name: str(folder / path) for name, path in vars(config.security).items()}
    assert got == replace(
        config, placement=None, worker_id="w-2", bind="0.0.0.0:7412", metrics_bind="127.0.0.1:9402",
        model=str(folder / "model"), blob_root=str(folder / "blobs"), security=type(config.security)(**files),
    )  # fmt: skip
    assert got.redis == "redis://u:p%40ss@r:6379/1"
    assert not any("p@ss" in word or "p%40ss" in word for word in placement.arguments)


def test_a_hub_id_and_a_url_stay_as_they_are():
    config, placement = placed("--model", "org/name", "--blob-root", "s3://bucket/blobs")
    got = worker(config, placement, 0)
    assert (got.model, got.blob_root) == ("org/name", "s3://bucket/blobs")


@pytest.mark.parametrize(
    ("router", "gpus", "bind", "device"),
    [("127.0.0.1:7400", "0", "127.0.0.1:0", "cpu"), ("router.example.org:7400", "0.5", "0.0.0.0:0", "")],
)
def test_what_is_not_said_follows_from_router_and_gpus(router, gpus, bind, device):
    config, placement = placed("--model", "m", "--router", router, "--gpus-per-engine", gpus)
    got = worker(config, placement, 3)
    assert (got.bind, got.device, got.metrics_bind) == (bind, device, "")


def test_a_bundle_has_what_an_engine_needs():
    assert placed("--model", "m", "--cpus-per-engine", "8")[1].bundle == {"CPU": 8.0, "GPU": 1.0}
    assert placed("--model", "m", "--gpus-per-engine", "0")[1].bundle == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "0"), "--replicas is 0"),
        (("--gpus-per-engine", "0", "--cpus-per-engine", "0"), "not both 0"),
        (("--gpus-per-engine", "1.5"), "must be a whole number"),
        (("--gpus-per-engine", "-1"), "must be 0 or above"),
        (("--placement-timeout-s", "nan"), "--placement-timeout-s is nan"),
        (("--router", ""), "needs --router"),
        (("--advertise", "10.0.0.9:7410"), "--advertise names one worker"),
        (("--redis", "redis://:secret@r:6379"), "--redis-password-file"),
        (("--ray-address", "ray://10.0.0.1:10001"), "is a URL"),
        (("--ray-address", ""), "$RAY_ADDRESS"),
        (("--placement", "local"), "needs --placement ray"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse_args([*RAY, "--model", "m", *flags])
    assert message in capsys.readouterr().err


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        SystemExit, match=r"headwater-rollout: --placement ray needs Ray: pip install 'headwater\[ray\]'"
    ):
        main([*RAY, "--model", "m", "--insecure"])
