"""Finding rewards: built-in ones, entry points of other packages, and the example of the README."""

import re
from pathlib import Path

import numpy as np
import pytest
from headwater_reward import checks, registry
from headwater_reward.batching import PendingItem, score_items
from headwater_reward.rewards.color_shape import ColorShapeReward

from headwater.errors import FailedPrecondition, NotFound

README = Path(__file__).parents[2] / "services" / "reward" / "README.md"


@pytest.fixture
def foreign_package(tmp_path, monkeypatch):
    """A package on sys.path that declares entry points of group headwater.rewards, as an installed one would."""

    def make(source, entry_points):
        (tmp_path / "foreign_rewards.py").write_text(source)
        info = tmp_path / "foreign_rewards-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-rewards\nVersion: 1.0\n")
        lines = [f"{name} = foreign_rewards:{attribute}" for name, attribute in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[headwater.rewards]", *lines]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_all_installed_rewards_are_the_default():
    assert [reward.name for reward in registry.create([])] == [
        "color_shape", "jpeg_compressibility", "jpeg_incompressibility", "ocr", "tiny-geneval",
    ]  # fmt: skip


def test_an_unknown_reward_names_the_nearest():
    with pytest.raises(NotFound, match="did you mean 'color_shape'"):
        registry.create(["color_shap"])


def test_the_reward_of_the_readme_works_when_a_package_declares_it(foreign_package):
    source = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    foreign_package(source, {"brightness": "Brightness"})
    (reward,) = registry.create(["brightness"])
    reward.load(1)
    golden = reward.golden_images()
    params = registry.parse_params(reward.params_model, {}, field="params")
    items = [PendingItem(lambda g=g: g.image_HWC[np.newaxis], g.prompt, {}, params) for g in golden]
    assert checks.compare(reward.name, golden, score_items(reward, items)).passed
    assert "brightness" in [reward.name for reward in registry.create([])]


def test_a_reward_that_takes_the_name_of_another_is_refused(foreign_package):
    foreign_package("class Ocr: ...", {"ocr": "Ocr"})
    with pytest.raises(FailedPrecondition, match="declared twice"):
        registry.known()


def test_a_reward_whose_packages_are_missing_is_left_out_unless_asked_for(monkeypatch):
    monkeypatch.setattr(ColorShapeReward, "requires", ("no_such_module",))
    assert "color_shape" not in [reward.name for reward in registry.create([])]
    with pytest.raises(FailedPrecondition, match=r"needs no_such_module.*pip install"):
        registry.create(["color_shape"])
