"""Skips and fixtures of the GPU tests."""

from pathlib import Path

import pytest
import torch

from headwater.diffusion import tiny_sd3

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER not in item.path.parents:  # the hook sees the tests of every folder
            continue
        needed = 2 if item.get_closest_marker("two_gpus") else 1
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_sd3.build(tmp_path_factory.mktemp("models") / tiny_sd3.DEFAULT_NAME)
