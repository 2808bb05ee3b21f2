"""Runs a plan at a router and keeps what came back: a record per sample, and the pictures of the grid."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from PIL import Image

from headwater._submission import Entry, Submission
from headwater.common.v1.sample_pb2 import Sample
from headwater.errors import FailedPrecondition, HeadwaterError, from_item_error
from headwater.evaluation.plan import NO_TAG, Plan, tag_of
from headwater.router.v1.router_pb2 import GetStatusRequest
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.versions import satisfies

MAX_IN_FLIGHT = 32
_HOPELESS = 8  # so many first results that failed, and not by their prompt, say that the others will fail as well
_WEIGHTS_WAIT_S = 15.0
_OF_THE_PROMPT = ("prompt", "text", "metadata")


@dataclass(frozen=True)
class Record:
    """One sample as results.json keeps it; either in `values` or in `errors`, for each reward."""

    prompt_index: int
    sample_index: int
    prompt: str
    tag: str
    seed: int
    values: dict[str, float] = field(default_factory=dict)
    """"score", each reward by name, and NAME.correct where the reward tells it."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why a reward is missing, by name; "score" when the whole prompt failed."""
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    weight_run_id: str | None = None
    weight_step: int | None = None


@dataclass(frozen=True)
class Picture:
    """The first image of a prompt, for the grid."""

    prompt_index: int
    prompt: str
    tag: str
    image: Image.Image
    score: float | None


@dataclass
class Collected:
    """All that came back."""

    records: list[Record] = field(default_factory=list)
    """Sorted by prompt and sample at the end."""
    pictures: list[Picture] = field(default_factory=list)


def collect(
    channel: grpc.Channel, plan: Plan, progress: Callable[[list[Record]], None] = lambda records: None
) -> Collected:
    """Run `plan`; `progress` is given the records of each prompt as it finishes.

    Raises `FailedPrecondition` without a worker or without the weights asked for, the error of a prompt when the first
    eight fail by what all have in common (an unknown reward, a size that the model cannot make) or nothing could be
    scored, and grpc.RpcError when the router is lost.
    """
    stub = RouterServiceStub(channel)
    _check_workers(stub, plan)
    found, first_error = Collected(), None
    results: Any = Submission(stub.SubmitPrompts, plan.messages(), max_in_flight=MAX_IN_FLIGHT, resubmit=True).results()
    hopeless = 0
    with contextlib.closing(results):
        for prompt, result in results:
            index = int(prompt.request_id.rpartition("-")[2])
            if isinstance(result, HeadwaterError):
                first_error = first_error or result
                hopeless += not _is_of_the_prompt(result) and not any(one.values for one in found.records)
                if hopeless >= _HOPELESS:
                    raise result
                records = list(_failed(plan, index, result))
            else:
                records = _finished(plan, index, result, found.pictures)
            found.records += records
            progress(records)
    if first_error is not None and not any(record.values for record in found.records):
        raise first_error
    found.records.sort(key=lambda record: (record.prompt_index, record.sample_index))
    found.pictures.sort(key=lambda picture: picture.prompt_index)
    return found


def _check_workers(stub: RouterServiceStub, plan: Plan) -> None:
    """Some worker is there, with the weights asked for at the latest after a moment: an update may be on its way."""
    deadline = time.monotonic() + min(plan.timeout_s, _WEIGHTS_WAIT_S)
    while True:
        workers = stub.GetStatus(GetStatusRequest(), timeout=10.0).workers
        have = {worker.worker_id: worker.report.weight_version for worker in workers}
        if not have:
            raise FailedPrecondition(
                "no rollout worker is registered at the router; start one with `headwater up`, or see "
                "`headwater status`",
                reason="NO_WORKER",
            )
        wanted = plan.min_version
        if wanted is None or any(satisfies(version, wanted) for version in have.values()):
            return
        if time.monotonic() > deadline:
            served = ", ".join(f"{name}: run {one.run_id!r} step {one.step}" for name, one in sorted(have.items()))
            raise FailedPrecondition(
                f"no worker serves the weights of run {wanted.run_id!r} step {wanted.step} or newer ({served})",
                field="min_version",
                reason="WEIGHTS_TOO_OLD",
            )
        time.sleep(0.5)


def _is_of_the_prompt(error: HeadwaterError) -> bool:
    return error.field.removeprefix("prompt.").partition(".")[0] in _OF_THE_PROMPT


def _failed(plan: Plan, index: int, error: HeadwaterError) -> Iterator[Record]:
    item = plan.items[index]
    for number, seed in enumerate(plan.seeds(index)):
        yield Record(
            index, number, item.text, tag_of(item) or NO_TAG, seed, errors={"score": f"{error.reason}: {error.message}"}
        )


def _finished(plan: Plan, index: int, entry: Entry, pictures: list[Picture]) -> list[Record]:
    item = plan.items[index]
    samples = sorted(entry.samples, key=lambda sample: sample.id.index)
    tag = tag_of(item) or _tag_of_reward(samples) or NO_TAG
    records = [_record(index, item.text, tag, sample) for sample in samples]
    if samples and samples[0].media.data and samples[0].media.mime_type.startswith("image/"):
        image = Image.open(io.BytesIO(samples[0].media.data)).convert("RGB")
        pictures.append(Picture(index, item.text, tag, image, records[0].values.get("score")))
    return records


def _tag_of_reward(samples: list[Sample]) -> str | None:
    keys = (key for sample in samples for score in sample.rewards for key in sorted(score.details))
    return next((key.removeprefix("tag_") for key in keys if key.startswith("tag_")), None)


def _record(index: int, prompt: str, tag: str, sample: Sample) -> Record:
    values: dict[str, float] = {"score": sample.total_reward} if sample.HasField("total_reward") else {}
    errors, details = {}, {}
    for score in sample.rewards:
        if score.HasField("error"):
            error = from_item_error(score.error)
            errors[score.name] = f"{error.reason}: {error.message}"
            continue
        values[score.name] = score.value
        if score.details:
            details[score.name] = dict(score.details)
        if "correct" in score.details:
            values[f"{score.name}.correct"] = score.details["correct"]
    version = sample.last_step_version
    return Record(
        index, sample.id.index, prompt, tag, sample.seed, values, errors, details, version.run_id, version.step
    )


def weight_versions(records: list[Record]) -> list[dict[str, Any]]:
    """The weights that served, with the number of samples of each; the run id is "" for the weights as loaded."""
    counts: dict[tuple[str, int], int] = {}
    for record in records:
        if record.weight_step is not None:
            key = (record.weight_run_id or "", record.weight_step)
            counts[key] = counts.get(key, 0) + 1
    return [{"run_id": run, "step": step, "samples": count} for (run, step), count in sorted(counts.items())]
