import json
from pathlib import Path

import pytest

from headwater.diffusion import golden

VECTORS = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", sorted(golden.CHECKERS))
def test_vectors_of_each_file_pass(name, tmp_path):
    for path in VECTORS.glob(f"{name}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    checked = [row for row in golden.check_directory(tmp_path) if row.tolerance is not None]
    assert checked
    assert [row for row in checked if row.status != "pass"] == []


def test_nothing_is_skipped():
    assert [row for row in golden.check_directory(VECTORS) if row.tolerance is None] == []


def test_command_prints_one_json_object_and_succeeds(capsys):
    assert golden.main([str(VECTORS), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["failed"] == 0
    assert result["checked"] > 100


def test_command_fails_on_a_wrong_value(tmp_path, capsys):
    cases = json.loads((VECTORS / "ocr_reward.json").read_text())
    cases[3]["reward"] += 1e-6
    (tmp_path / "ocr_reward.json").write_text(json.dumps(cases))
    assert golden.main([str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_command_fails_on_a_missing_tensor(tmp_path, capsys):
    (tmp_path / "sde_step.json").write_text((VECTORS / "sde_step.json").read_text())
    assert golden.main([str(tmp_path)]) == 1
    assert "case0.model_output" in capsys.readouterr().out


def test_command_refuses_a_folder_without_vectors(tmp_path, capsys):
    assert golden.main([str(tmp_path)]) == 2
    assert "sde_step" in capsys.readouterr().err
