import json

import pytest
import torch

from headwater.diffusion import families


def pipeline(folder, name="StableDiffusion3Pipeline"):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
    for part, config in {
        "transformer": {"patch_size": 2, "in_channels": 16},
        "vae": {"block_out_channels": [1, 2, 4, 8]},
    }.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


def test_sd3_is_recognised_by_its_pipeline_class(tmp_path):
    family = families.resolve(pipeline(tmp_path))
    assert family.name == "sd3"
    assert family.size_multiple_px(tmp_path) == 16
    assert family.latent_shape(tmp_path, 512, 256) == (16, 64, 32)


def test_an_unknown_pipeline_names_the_supported_ones(tmp_path):
    with pytest.raises(ValueError, match="'FluxPipeline' is not supported; supported are StableDiffusion3Pipeline"):
        families.resolve(pipeline(tmp_path, "FluxPipeline"))


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("{", "not JSON"), ("[]", "JSON object")])
def test_a_folder_that_is_no_pipeline_is_an_error_naming_the_file(text, message, tmp_path):
    if text is not None:
        (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        families.resolve(tmp_path)
    assert "model_index.json" in str(caught.value)


def test_guidance_of_one_is_the_positive_branch_and_of_zero_the_negative(tmp_path):
    family = families.resolve(pipeline(tmp_path))
    positive, negative = torch.tensor([2.0]), torch.tensor([1.0])
    assert [family.guided(positive, negative, g).item() for g in (1.0, 0.0, 3.0)] == [2.0, 1.0, 4.0]


def test_another_component_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use one of transformer"):
        families.resolve(pipeline(tmp_path)).load_component(tmp_path, "vae", torch.float32)
