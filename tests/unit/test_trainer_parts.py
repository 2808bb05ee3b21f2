import asyncio
import contextlib
import json

import pytest
from headwater_trainer.config import parse_args
from headwater_trainer.feeder import Feeder
from headwater_trainer.groups import Cursor
from headwater_trainer.metrics import MetricsFile
from headwater_trainer.objectives import make_objective
from headwater_trainer.prompt_order import PromptOrder, group_id_of, sequence_of
from headwater_trainer.ranks import RunFailed
from headwater_trainer.runs import RunBoard, RunRecord

from headwater.config.load import parse_recipe
from headwater.config.prompts import PromptItem
from headwater.errors import FailedPrecondition, NotFound
from headwater.trainer.v1.trainer_pb2 import Run, RunState, StartRunRequest

ITEMS = [PromptItem(text) for text in "abcde"]


def record(run_id="run"):
    return RunRecord(Run(run_id=run_id, state=RunState.RUN_STATE_STARTING))


async def events_of(followed, first=0):
    return [event.WhichOneof("event") async for event in followed.follow(first)]


def test_each_pass_holds_every_prompt_once_in_an_order_of_its_own():
    order = PromptOrder(ITEMS, seed=3, shuffle=True)
    passes = [[order.prompt(p * 5 + i).text for i in range(5)] for p in range(4)]
    assert all(sorted(texts) == list("abcde") for texts in passes)
    assert len({tuple(texts) for texts in passes}) > 1
    again = PromptOrder(ITEMS, seed=3, shuffle=True)
    assert [again.prompt(i).text for i in (17, 3)] == [passes[3][2], passes[0][3]]  # from any point, in any order


def test_without_shuffling_prompts_come_in_file_order():
    order = PromptOrder(ITEMS, seed=3, shuffle=False)
    assert [order.prompt(i).text for i in range(7)] == list("abcdeab")


def test_seeds_depend_on_run_seed_and_group_only():
    order, other = PromptOrder(ITEMS, seed=3, shuffle=True), PromptOrder(ITEMS, seed=4, shuffle=True)
    assert order.seeds(7, 4) == order.seeds(7, 4)
    assert order.seeds(7, 4)[:2] == order.seeds(7, 2)
    assert len({*order.seeds(7, 4), *order.seeds(8, 4), *other.seeds(7, 4)}) == 12


def test_group_ids_sort_by_number():
    ids = [group_id_of(number) for number in (0, 9, 10, 12345)]
    assert ids == sorted(ids)
    assert [sequence_of(group_id) for group_id in ids] == [0, 9, 10, 12345]
    with pytest.raises(ValueError, match="not made by this trainer"):
        sequence_of("x1")


async def test_events_are_replayed_and_followed_to_the_end():
    run = record()
    run.notice("HELLO", "hello")
    following = asyncio.create_task(events_of(run))
    await asyncio.sleep(0.01)
    run.add_metrics(1, {"loss": 0.5, "bad": float("nan")})
    run.set_state(RunState.RUN_STATE_SUCCEEDED)
    assert await asyncio.wait_for(following, 5) == ["run", "notice", "metrics", "run"]
    assert await asyncio.wait_for(events_of(run, 2), 5) == ["metrics", "run"]


def test_an_ended_run_stays_as_it_ended():
    run = record()
    run.set_state(RunState.RUN_STATE_FAILED, "no")
    run.set_state(RunState.RUN_STATE_SUCCEEDED)
    assert (run.run.state, run.run.error) == (RunState.RUN_STATE_FAILED, "no")


def test_whoever_asks_for_a_checkpoint_gets_the_next_one_or_an_error():
    run = record()
    first = run.request_save()
    assert run.save_requested
    run.add_checkpoint(3, "/x")
    assert first.result(0).step == 3
    second = run.request_save()
    run.set_state(RunState.RUN_STATE_STOPPED)
    with pytest.raises(FailedPrecondition):
        second.result(0)
    with pytest.raises(FailedPrecondition):
        run.request_save()


def test_one_run_at_a_time_and_starting_it_again_changes_nothing():
    board = RunBoard()
    request = StartRunRequest(run_id="a")
    run = board.start(request, Run(run_id="a", state=RunState.RUN_STATE_STARTING))
    assert board.start(request, Run(run_id="a")) is run
    with pytest.raises(FailedPrecondition, match="'a' is active"):
        board.start(StartRunRequest(run_id="b"), Run(run_id="b"))
    assert board.take_request(0) == request
    assert board.take_request(0) is None
    run.set_state(RunState.RUN_STATE_FAILED, "no")
    assert board.start(request, Run(run_id="a")) is not run
    with pytest.raises(NotFound, match="known: a"):
        board.find("b")


def test_closing_stops_the_active_run():
    board = RunBoard()
    run = board.start(StartRunRequest(run_id="a"), Run(run_id="a"))
    board.close()
    assert run.stop_requested


def test_a_resumed_run_writes_its_lines_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resumed_step=0)
    for step in (1, 2, 3):
        first.append(step, {"loss": 0.5})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed while it wrote
    MetricsFile(path, resumed_step=2).append(3, {"loss": 0.25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_the_cursor_is_plain_json():
    cursor = Cursor(5, [3, 4], ["g00000001"])
    assert Cursor(**json.loads(json.dumps(cursor.to_json()))) == cursor


def test_a_deadline_that_cannot_be_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--blob-root", "b", "--output-dir", "o", "--wait-limit-s", "-1"])
    assert "--wait-limit-s is -1.0; it must be above 0" in capsys.readouterr().err


PARITY_RECIPE = """
[model]
path = "m"
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "color_shape"
[optimizer]
lr = 1e-4
[train]
steps = 1
groups_per_step = 1
group_size = 2
micro_batch_size = 2
[objective]
clip_range = 1e-3
"""


@pytest.mark.parametrize(
    ("extra", "values", "refused"),
    [
        ("", {"log_prob_drift/max": 6e-4}, True),
        ("", {"log_prob_drift/max": 4e-4}, False),
        ("", {"log_prob_drift/max": 1.0, "staleness/max": 1.0}, False),
        ("max_log_prob_drift = 2.0", {"log_prob_drift/max": 1.0}, False),
        ("recompute_old_log_prob = true", {"log_prob_drift/max": 1.0}, False),
        ("", {}, False),
    ],
)
def test_a_run_refuses_to_begin_when_engine_and_trainer_disagree(extra, values, refused):
    recipe = parse_recipe(PARITY_RECIPE + extra)
    with pytest.raises(RunFailed, match="disagree by") if refused else contextlib.nullcontext():
        make_objective(recipe).check_start(values)


def test_all_groups_of_a_round_are_submitted_with_the_steps_of_the_round():
    sliding = '[sampling]\nstep_strategy = "sliding"\nwindow_size = 2\nwindow_every = 1\n'
    recipe = parse_recipe(PARITY_RECIPE.replace("groups_per_step = 1", "groups_per_step = 3") + sliding)
    feeder = Feeder("127.0.0.1:1", "run", recipe, PromptOrder(ITEMS, seed=0, shuffle=False), lambda *_: None)
    steps = [list(feeder._prompt(number).sampling.transition.explicit_steps.steps) for number in range(9)]
    assert steps == [[0, 1]] * 3 + [[1, 2]] * 3 + [[2, 3]] * 3
