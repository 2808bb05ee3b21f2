"""Placement of processes on GPUs."""

from headwater.supervisor.gpus import assign, visible_gpus


def test_no_gpu_changes_nothing():
    assert assign([], 1, 2) == ({}, [{}, {}])


def test_trainer_first_then_one_gpu_per_worker():
    trainer, workers = assign(["0", "1", "2", "3"], 2, 2)
    assert trainer == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert workers == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]


def test_one_gpu_is_shared():
    assert assign(["0"], 1, 1) == ({"CUDA_VISIBLE_DEVICES": "0"}, [{"CUDA_VISIBLE_DEVICES": "0"}])


def test_the_users_choice_of_devices_is_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ("3", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
