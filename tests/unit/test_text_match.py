import pytest

from headwater.text_match import edit_distance, ocr_score


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == distance
    assert edit_distance(b, a) == distance


@pytest.mark.parametrize("prompt", ["a red circle", 'one "quote only', 'nothing in ""', 'spaces in "  "'])
def test_a_prompt_without_quoted_text_is_an_error_that_shows_the_prompt(prompt):
    with pytest.raises(ValueError, match="quote"):
        ocr_score(prompt, "text")


def test_the_score_never_falls_below_zero():
    assert ocr_score('"ab"', "xxxxxxxxxxxxxxx") == 0.0
