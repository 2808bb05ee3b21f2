"""`headwater reward list|check|score`: what a reward server hosts, whether it works, and what it says of an image."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output
from headwater.rpc import security

if TYPE_CHECKING:
    from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub

DEFAULT_REWARD = "127.0.0.1:7401"
MIME_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("reward", help="list, check and try the rewards of a server", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="rewards with their ranges and parameters")
    check = actions.add_parser("check", help="score the golden images; status 1 when a reward fails")
    check.add_argument("names", nargs="*", metavar="NAME", help="rewards to check (default: all)")
    score = actions.add_parser("score", help="score one image; status 1 when a reward gives an error")
    score.add_argument("image", type=Path, metavar="IMAGE", help="PNG, JPEG or WebP file")
    score.add_argument("--prompt", required=True, help="the prompt that the image was made from")
    score.add_argument("--metadata", default="{}", metavar="JSON", help="metadata of the prompt, a JSON object")
    score.add_argument("--rewards", default="", metavar="NAMES", help="comma-separated (default: all)")
    for action, run in ((listing, run_list), (check, run_check), (score, run_score)):
        action.add_argument(
            "--reward", metavar="HOST:PORT", default=os.environ.get("HEADWATER_REWARD", DEFAULT_REWARD),
            help="reward server (default: $HEADWATER_REWARD, then %(default)s)",
        )  # fmt: skip
        action.add_argument("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds (default %(default)s)")
        security.add_arguments(action, server=False)
        options.add_json(action)
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """List the rewards."""
    from headwater.reward.v1.reward_pb2 import ListRewardsRequest

    rewards = _call(args, lambda stub: stub.ListRewards(ListRewardsRequest(), timeout=args.timeout))["rewards"]
    if args.json:
        output.print_json({"rewards": rewards})
        return 0
    for reward in rewards:
        low, high = (reward.get(key, "unbounded") for key in ("minimum", "maximum"))
        print(f"{reward['name']:24} {reward['description']} [{low}, {high}]")
        if reward.get("default_params"):
            print(f"{'':24} parameters: {json.dumps(reward['default_params'])}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Score the golden images."""
    from headwater.reward.v1.reward_pb2 import CheckRewardsRequest

    request = CheckRewardsRequest(names=args.names)
    checks = _call(args, lambda stub: stub.CheckRewards(request, timeout=args.timeout))["checks"]
    if args.json:
        output.print_json({"checks": checks})
    else:
        for check in checks:
            verdict = "passed" if check["passed"] else f"FAILED: {check['detail']}"
            print(f"{check['name']:24} {check['image_count']} golden images, {verdict}")
    return 0 if checks and all(check["passed"] for check in checks) else 1


def run_score(args: argparse.Namespace) -> int:
    """Score one image."""
    from headwater.common.v1.reward_pb2 import RewardSpec
    from headwater.common.v1.sample_pb2 import Media
    from headwater.errors import InvalidArgument
    from headwater.reward.v1.reward_pb2 import ListRewardsRequest, ScoreGroupRequest

    mime_type = MIME_TYPES.get(args.image.suffix.lower())
    if mime_type is None:
        raise InvalidArgument(f"{args.image} is none of {', '.join(MIME_TYPES)}; convert it", field="IMAGE")
    try:
        medium = Media(mime_type=mime_type, data=args.image.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"cannot read {args.image}: {error.strerror}", field="IMAGE") from None
    request = ScoreGroupRequest(prompt=args.prompt, media=[medium])
    try:
        request.metadata.update(json.loads(args.metadata))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"--metadata is not a JSON object: {error}", field="metadata") from None

    def score(stub: "RewardServiceStub") -> Any:
        names = [name.strip() for name in args.rewards.split(",") if name.strip()]
        if not names:
            names = [info.name for info in stub.ListRewards(ListRewardsRequest(), timeout=args.timeout).rewards]
        request.rewards.extend(RewardSpec(name=name) for name in names)
        return stub.ScoreGroup(request, timeout=args.timeout)

    scores = _call(args, score)["samples"][0]["scores"]
    if args.json:
        output.print_json({"scores": scores})
    else:
        for each in scores:
            details = "".join(f"  {key}={value:.4g}" for key, value in sorted(each["details"].items()))
            outcome = f"{each['value']:.6g}{details}" if "value" in each else f"error: {each['error']['message']}"
            print(f"{each['name']:24} {outcome}")
    return 0 if all("value" in each for each in scores) else 1


def _call(args: argparse.Namespace, call: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    from headwater.cli.connect import connected
    from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub

    with connected(args.reward, "reward") as channel:
        return MessageToDict(
            call(RewardServiceStub(channel)),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value
