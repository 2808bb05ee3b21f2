"""The public Python client: submit prompts to a router and get scored images back. Blocking, no torch.

    from headwater.client import Client

    with Client("127.0.0.1:7400") as client:
        group = client.submit("a red circle", n=4, rewards=["color_shape"], steps=10, height_px=64, width_px=64)
        for sample in group.samples:
            print(sample.seed, sample.total_reward, sample.rewards, sample.weight_version)
        best = max(group.samples, key=lambda sample: sample.total_reward or 0.0)
        best.image.save("best.png")

        for group in client.stream(["a blue square", "a green triangle"], n=2, rewards=["color_shape"]):
            if group.error is not None:
                print(group.prompt, "failed:", group.error)
                continue
            print(group.prompt, [sample.total_reward for sample in group.samples])

Every failure is a `headwater.errors.HeadwaterError`; every wait has a deadline.
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import grpc

from headwater._submission import Submission
from headwater.common.v1 import reward_pb2, sample_pb2, sampling_pb2
from headwater.errors import HeadwaterError, Unavailable, duration, from_item_error
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.security import Security

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_ADDRESS = "127.0.0.1:7400"
DEFAULT_TIMEOUT_S = 600.0
"""From acceptance to outcome of one prompt."""
DEFAULT_STEPS = 10
DEFAULT_SIDE_PX = 64
"""Steps and size of the small model that the project ships; give your own model's."""


class WeightVersion(NamedTuple):
    """The weights that made a sample: a run ("" for the weights as loaded) and its optimizer step."""

    run_id: str
    step: int


@dataclass(frozen=True)
class Sample:
    """One generated image with its scores."""

    image_bytes: bytes = field(repr=False)
    """Encoded file; empty when media was not asked for."""
    mime_type: str
    seed: int
    rewards: dict[str, float]
    """Score of each reward that could be computed, in the reward's own scale."""
    reward_errors: dict[str, HeadwaterError]
    """Why the others could not."""
    total_reward: float | None
    """Weighted sum of the rewards; None when one is missing or none was asked for."""
    weight_version: WeightVersion

    @property
    def image(self) -> "Image":
        """The decoded image. Raises `ValueError` when there are no bytes or when they are a video."""
        from PIL import Image

        if not self.mime_type.startswith("image/") or not self.image_bytes:
            raise ValueError(f"this sample has {len(self.image_bytes)} bytes of {self.mime_type!r}, not an image")
        return Image.open(io.BytesIO(self.image_bytes))


@dataclass(frozen=True)
class Group:
    """All samples of one prompt; either `samples` or `error`."""

    prompt: str
    samples: tuple[Sample, ...] = ()
    request_id: str = ""
    worker_id: str = ""
    error: HeadwaterError | None = None


class Options(TypedDict, total=False):
    """What may be said of each prompt, by keyword."""

    n: int
    """Samples per prompt (default 1); ignored when `seeds` are given."""
    rewards: Sequence[str | reward_pb2.RewardSpec] | Mapping[str, float]
    """Names, full specifications, or names with weights."""
    steps: int
    height_px: int
    width_px: int
    guidance_scale: float
    negative_prompt: str
    noise_level: float
    """Sample with Flow-GRPO's SDE at this noise level instead of the deterministic ODE."""
    seeds: Sequence[int]
    metadata: Mapping[str, Any]
    """Handed to the rewards."""
    sampling: sampling_pb2.SamplingParams
    """Full control; replaces steps, sizes, guidance, negative prompt and noise level."""
    min_weight_version: WeightVersion
    timeout_s: float
    """From acceptance to outcome (default 600)."""
    return_media: bool
    """Whether images come back (default True)."""


class Client:
    """A connection to a router. Use it as a context manager; safe to share between threads."""

    def __init__(self, address: str | None = None, *, security: Security | None = None) -> None:
        """`address` is host:port; default $HEADWATER_ROUTER, then 127.0.0.1:7400. Connects on first use.

        `security` names certificates and token; default what HEADWATER_TLS_CA, HEADWATER_TLS_CERT, HEADWATER_TLS_KEY
        and HEADWATER_TOKEN_FILE name. Raises `InvalidArgument` when those files cannot be used.
        """
        self.address = address or os.environ.get("HEADWATER_ROUTER") or DEFAULT_ADDRESS
        self._channel = sync_channel(self.address, security=security)
        self._stub = RouterServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; streams that are still open end with an error."""
        self._channel.close()

    def submit(self, text: str, **options: Unpack[Options]) -> Group:
        """Generate one group and wait for it. Raises the error of the prompt, e.g. `InvalidArgument`, `OutOfBudget`."""
        (group,) = self._stream(iter([_prompt(text, options)]), max_in_flight=1, resubmit=False)
        if group.error is not None:
            raise group.error
        return group

    def stream(self, prompts: Iterable[str], *, max_in_flight: int = 32, **options: Unpack[Options]) -> Iterator[Group]:
        """Generate a group per prompt and yield each as it finishes, in any order; at most `max_in_flight` at once.

        A prompt that fails is a `Group` with `error`; one refused because a queue or budget is full is submitted
        again. Raises only when the router itself is lost. Leaving the loop early cancels what is still running.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        return self._stream((_prompt(text, options) for text in prompts), max_in_flight, resubmit=True)

    def cancel(self, request_id: str, *, timeout_s: float = 10.0) -> bool:
        """Cancel a request; False when it had ended. Raises `NotFound` for an unknown id."""
        request = pb.CancelRequestRequest(request_id=request_id)
        return self._call(self._stub.CancelRequest, request, timeout_s).cancelled

    def status(self, *, timeout_s: float = 10.0) -> pb.GetStatusResponse:
        """Workers, queue and budgets: the GetStatusResponse message. Raises `Unavailable` without a router."""
        return self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s)

    def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _error(self, error: grpc.RpcError) -> HeadwaterError:
        result = from_rpc_error(error)
        if isinstance(result, Unavailable) and result.reason == "UNAVAILABLE":  # not the router's own words
            return Unavailable(
                f"no router answers at {self.address} ({result.message}); start one with `headwater up`, "
                "or set HEADWATER_ROUTER",
                reason="ROUTER_UNREACHABLE",
            )
        return result

    def _stream(self, prompts: Iterator[pb.Prompt], max_in_flight: int, *, resubmit: bool) -> Iterator[Group]:
        submission = Submission(self._stub.SubmitPrompts, prompts, max_in_flight=max_in_flight, resubmit=resubmit)
        try:
            for prompt, result in submission.results():
                if isinstance(result, HeadwaterError):
                    yield Group(prompt.text, request_id=prompt.request_id, error=result)
                else:
                    samples = tuple(_sample(sample) for sample in result.samples)
                    yield Group(prompt.text, samples, prompt.request_id, result.outcome.worker_id)
        except grpc.RpcError as error:
            raise self._error(error) from error


def _prompt(text: str, options: Options) -> pb.Prompt:
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(
            f"unknown option {sorted(unknown)[0]!r}; there are: {', '.join(sorted(Options.__annotations__))}"
        )
    prompt = pb.Prompt(
        text=text,
        sample_count=options.get("n", 1),
        seeds=options.get("seeds", ()),
        sampling=options.get("sampling") or _sampling(options),
        rewards=_rewards(options.get("rewards", ())),
        return_media=options.get("return_media", True),
        timeout=duration(options.get("timeout_s", DEFAULT_TIMEOUT_S)),
    )
    if "metadata" in options:
        prompt.metadata.update(dict(options["metadata"]))
    if "min_weight_version" in options:
        run_id, step = options["min_weight_version"]
        prompt.min_weight_version.CopyFrom(sample_pb2.WeightVersion(run_id=run_id, step=step))
    return prompt


def _sampling(options: Options) -> sampling_pb2.SamplingParams:
    params = sampling_pb2.SamplingParams(
        steps=options.get("steps", DEFAULT_STEPS),
        height_px=options.get("height_px", DEFAULT_SIDE_PX),
        width_px=options.get("width_px", DEFAULT_SIDE_PX),
        guidance_scale=options.get("guidance_scale"),
        negative_prompt=options.get("negative_prompt", ""),
    )
    if "noise_level" in options:
        params.transition.kind = sampling_pb2.TransitionKind.TRANSITION_KIND_SDE
        params.transition.noise_level = options["noise_level"]
    return params


def _rewards(rewards: Sequence[str | reward_pb2.RewardSpec] | Mapping[str, float]) -> list[reward_pb2.RewardSpec]:
    if isinstance(rewards, str):
        raise TypeError(f"rewards is the text {rewards!r}; give a list: [{rewards!r}]")
    if isinstance(rewards, Mapping):
        return [reward_pb2.RewardSpec(name=name, weight=weight) for name, weight in rewards.items()]
    return [reward_pb2.RewardSpec(name=item) if isinstance(item, str) else item for item in rewards]


def _sample(sample: sample_pb2.Sample) -> Sample:
    scored = {score.name: score.value for score in sample.rewards if score.HasField("value")}
    failed = {score.name: from_item_error(score.error) for score in sample.rewards if score.HasField("error")}
    version = sample.last_step_version
    return Sample(
        image_bytes=sample.media.data,
        mime_type=sample.media.mime_type,
        seed=sample.seed,
        rewards=scored,
        reward_errors=failed,
        total_reward=sample.total_reward if sample.HasField("total_reward") else None,
        weight_version=WeightVersion(version.run_id, version.step),
    )
