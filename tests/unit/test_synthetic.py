"""The generator of drawn pictures: determinism, the split, captions that can be read back, files."""

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from PIL import Image

from headwater.config.prompts import load_prompts
from headwater.config.recipe import PromptsSection
from headwater.synthetic import Requirements, Scene, Wanted, draw, parse, sample
from headwater.synthetic.__main__ import different_prompts, main
from headwater.synthetic.generate import random_scene
from headwater.synthetic.scene import BACKGROUNDS, COLORS, MAX_COUNT, RELATIONS, SHAPE_TAGS, SHAPES, TAGS

PROMPTS = Path(__file__).parents[2] / "recipes" / "prompts"


def scenes(split, count, tags=TAGS):
    return [random_scene(random.Random(f"test {split} {k}"), split, tags) for k in range(count)]


def combinations(scene):
    """Every combination that a picture shows, spelled out independently of the rules of the split."""
    if scene.requirements.text:
        return {("text", scene.requirements.text)}
    things = [(p.color, p.shape) for p in scene.placed]
    found = {("alike", *sorted(things)), ("setting", *sorted(p.shape for p in scene.placed), scene.background)}
    if len(set(things)) == 2:
        first, second = scene.placed
        horizontal = abs(first.x - second.x) > abs(first.y - second.y)
        by_place = sorted(scene.placed, key=lambda p: p.x if horizontal else p.y)
        found.add(("beside" if horizontal else "stacked", *((p.color, p.shape) for p in by_place)))
    return found


def asked(scene):
    """The combination that the caption tells."""
    wanted = scene.requirements
    if wanted.text or wanted.tag == "position":
        kinds = {"text", "beside", "stacked"}
    else:
        kinds = {"setting"} if wanted.tag in ("single_object", "two_object") else {"alike"}
    return {found for found in combinations(scene) if found[0] in kinds}


def test_equal_arguments_give_equal_samples_and_other_ones_do_not():
    first, again = sample(3, 5), sample(3, 5)
    assert np.array_equal(first.image_HWC, again.image_HWC)
    assert (first.caption, first.metadata) == (again.caption, again.metadata)
    images = [sample(*which).image_HWC.tobytes() for which in ((3, 5), (3, 6), (4, 5), (3, 5, "eval"))]
    assert len(set(images)) == 4


@pytest.mark.parametrize("size_px", [32, 64, 200])
def test_pictures_have_the_size_asked_for(size_px):
    image = sample(0, 1, size_px=size_px).image_HWC
    assert (image.shape, image.dtype) == ((size_px, size_px, 3), np.uint8)


def test_what_evaluation_prompts_ask_for_is_never_drawn_for_training():
    shown = set().union(*map(combinations, scenes("train", 6000)))
    held_out = set().union(*map(asked, scenes("eval", 2000)))
    assert len(held_out) > 300
    assert not shown & held_out


def test_training_shows_every_single_attribute():
    drawn = scenes("train", 1500)
    assert {p.shape for s in drawn for p in s.placed} == set(SHAPES)
    assert {p.color for s in drawn for p in s.placed} == set(COLORS)
    assert {o.count for s in drawn for o in s.requirements.objects} == set(range(1, MAX_COUNT + 1))
    assert {s.requirements.relation for s in drawn} == {None, *RELATIONS}
    assert {s.background for s in drawn} == set(BACKGROUNDS)
    tags = Counter(s.requirements.tag for s in drawn)
    assert set(tags) == set(TAGS)
    assert min(tags.values()) > 150


def test_evaluation_holds_out_every_shape_and_colour_somewhere():
    prompts = different_prompts(240, seed=0, split="eval", tags=SHAPE_TAGS)
    objects = [o for entry in prompts for o in entry["metadata"]["objects"]]
    assert min(Counter(o["shape"] for o in objects).values()) > 50
    assert min(Counter(o["color"] for o in objects if "color" in o).values()) > 15


def test_objects_lie_inside_and_apart():
    for scene in scenes("train", 800, SHAPE_TAGS):
        for p in scene.placed:
            assert all(at - p.radius > 0.04 and at + p.radius < 0.96 for at in (p.x, p.y)), p
        for a, b in itertools.combinations(scene.placed, 2):
            assert max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius + 0.07, (a, b)


def test_captions_can_be_read_back():
    for index in range(1500):
        pair = sample(1, index, ("train", "eval")[index % 2], size_px=8)
        assert parse(pair.caption).to_metadata() == pair.metadata, pair.caption


def test_requirements_survive_the_protocol():
    wanted = Requirements("counting", (Wanted("star", "red", 3),))
    struct = Struct()
    struct.update(wanted.to_metadata())
    assert Requirements.from_metadata(json_format.MessageToDict(struct)) == wanted


@pytest.mark.parametrize(
    ("prompt", "objects", "relation"),
    [
        ("A RED circle, please!", (Wanted("circle", "red"),), None),
        ("turquoise discs? no: 4 violet stars", None, None),
        ("4 violet stars", (Wanted("star", "purple", 4),), None),
        ("a red dog and a circle", (Wanted("circle"),), None),
        ("a star beneath two pink squares", (Wanted("star"), Wanted("square", "pink", 2)), "below"),
        ("above all, a star", (Wanted("star"),), None),
        ("a big round red thing", None, None),
        ("five circles", None, None),
        ("7 circles", None, None),
        ("circles", None, None),
    ],
)
def test_prompts_of_clients_are_read_or_refused(prompt, objects, relation):
    if objects is None:
        with pytest.raises(ValueError, match=r"supported|write a number"):
            parse(prompt)
    else:
        assert (parse(prompt).objects, parse(prompt).relation) == (objects, relation)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tag": "colors", "objects": [{"shape": "cube"}]}, "'cube'; supported: circle"),
        ({"tag": "colors", "objects": [{"shape": "star", "color": "beige"}]}, "'beige'; supported: red"),
        ({"tag": "counting", "objects": [{"shape": "star", "count": 9}]}, "supported: 1 to 4"),
        ({"tag": "position", "objects": [{"shape": "star"}], "relation": "above"}, "between two"),
        ({"tag": "colour", "objects": [{"shape": "star"}]}, "supported: single_object"),
        ({"tag": "colors", "objects": ["star"]}, "write it like"),
        ({"objects": [{"shape": "star"}]}, "KeyError: 'tag'"),
        ({"tag": "text"}, "has a text"),
    ],
)
def test_wrong_metadata_is_refused_with_a_remedy(metadata, message):
    with pytest.raises(ValueError, match=message):
        Requirements.from_metadata(metadata)


def test_text_keeps_inside_the_picture():
    for text in ("WWW", "HI", "11", "842"):
        for background in ("white", "black"):
            image = np.asarray(draw(Scene(Requirements("text", text=text), (), background), 64)).astype(int)
            strokes = np.abs(image - image[0, 0]).max(axis=-1) > 60
            ys, xs = np.nonzero(strokes)
            assert 3 <= xs.min() < xs.max() <= 60, text
            assert ys.max() - ys.min() >= 11, text


def test_the_committed_prompts_are_what_the_commands_of_the_docs_write(tmp_path):
    for name, options in (("geneval", []), ("text", ["--tags", "text", "--train-count", "120", "--eval-count", "60"])):
        files = [f"tiny_{name}_{split}.jsonl" for split in ("train", "eval")]
        main(["prompts", *(str(tmp_path / file) for file in files), *options])
        for file in files:
            assert (tmp_path / file).read_text() == (PROMPTS / file).read_text()
            assert (PROMPTS / file).stat().st_size < 200_000
            items = load_prompts(PromptsSection(path=str(PROMPTS / file)))
            assert all(Requirements.from_metadata(item.metadata) == parse(item.text) for item in items)


def test_the_beginning_of_a_prompt_list_has_every_tag():
    prompts = different_prompts(60, seed=1, split="eval", tags=SHAPE_TAGS)
    assert Counter(entry["metadata"]["tag"] for entry in prompts[:12]) == dict.fromkeys(SHAPE_TAGS, 2)
    assert len({entry["prompt"] for entry in prompts}) == 60


def test_pairs_are_written_as_lines_and_pictures(tmp_path):
    main(["pairs", str(tmp_path), "--count", "5", "--seed", "2", "--size-px", "48"])
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    pair = sample(2, 4, size_px=48)
    assert (lines[4]["prompt"], lines[4]["metadata"]) == (pair.caption, pair.metadata)
    assert np.array_equal(np.asarray(Image.open(tmp_path / lines[4]["image"])), pair.image_HWC)


def test_an_unknown_split_or_tag_is_refused():
    with pytest.raises(ValueError, match="supported: train, eval"):
        sample(0, 0, "test")
    with pytest.raises(ValueError, match="supported: single_object"):
        sample(0, 0, tags=("colour",))


def test_the_package_imports_no_torch():
    code = "import sys, headwater.synthetic; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
