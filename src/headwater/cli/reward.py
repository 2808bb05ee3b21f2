"""`headwater reward list|check|score`: what a reward server hosts, whether it works, what it says about an image."""

import argparse
import json
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
    """Add the command and its three parts."""
    parser = commands.add_parser("reward", help="list, check or try the rewards of a server", description=__doc__)
    parts = parser.add_subparsers(dest="part", metavar="list|check|score", required=True)
    listing = parts.add_parser("list", help="rewards, their ranges and parameters")
    check = parts.add_parser("check", help="score the golden images; status 1 when a reward fails them")
    check.add_argument("names", metavar="NAME", nargs="*", help="rewards to check (default: all)")
    score = parts.add_parser("score", help="score images of one prompt")
    add = score.add_argument
    add("images", metavar="IMAGE", nargs="+", type=Path, help="PNG, JPEG or WebP files; together they are one group")
    add("--prompt", required=True, help="what the images were made from")
    add("--rewards", metavar="NAMES", help="comma-separated (default: all that the server hosts)")
    add("--params", metavar="JSON", default="{}", help="of all rewards asked for, e.g. '{\"frames\": 4}'")
    add("--metadata", metavar="JSON", default="{}", help="of the prompt")
    for part, run in ((listing, run_list), (check, run_check), (score, run_score)):
        part.add_argument(
            "--reward", metavar="HOST:PORT", default=os.environ.get("HEADWATER_REWARD", DEFAULT_REWARD),
            help="reward server (default: $HEADWATER_REWARD, then %(default)s)",
        )  # fmt: skip
        part.add_argument("--timeout-s", metavar="S", type=float, default=600.0, help="(default %(default)s)")
        security.add_arguments(part, server=False)
        options.add_json(part)
        part.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """One line per reward."""
    from headwater.cli.connect import connected

    with connected(args.reward, "reward") as channel:
        rewards = [_plain(info) for info in _list(_stub(channel), args)]
    if args.json:
        output.print_json({"rewards": rewards})
        return 0
    for info in rewards:
        low, high = info.get("minimum", "-inf"), info.get("maximum", "inf")
        check = info.get("check")
        state = "not checked" if check is None else "ok" if check["passed"] else f"FAILS: {check['detail']}"
        print(f"{info['name']:24}{low} to {high}  {info['description']} [{state}]")
        print(f"{'':24}parameters: {json.dumps(info.get('default_params', {}))}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """One line per reward; 1 when one fails."""
    from headwater.cli.connect import connected
    from headwater.reward.v1.reward_pb2 import CheckRewardsRequest

    with connected(args.reward, "reward") as channel:
        request = CheckRewardsRequest(names=args.names)
        checks = [_plain(c) for c in _stub(channel).CheckRewards(request, timeout=args.timeout_s).checks]
    passed = all(check["passed"] for check in checks)
    for check in checks:
        figures = f"{check['image_count']} images, worst difference {check['worst_error']:.4f}"
        print(f"{check['name']:24}{'ok' if check['passed'] else 'FAILS'}  {figures} {check['detail']}".rstrip())
    if args.json:
        output.print_json({"passed": passed, "checks": checks})
    return 0 if passed else 1


def run_score(args: argparse.Namespace) -> int:
    """A line per image and reward; 1 when there is no score for one."""
    from headwater.cli.connect import connected
    from headwater.common.v1.sample_pb2 import Media
    from headwater.reward.v1.reward_pb2 import ScoreGroupRequest

    request = ScoreGroupRequest(prompt=args.prompt)
    request.metadata.update(_object(args.metadata, "metadata"))
    request.media.extend(Media(mime_type=_mime_type(path), data=_read(path)) for path in args.images)
    with connected(args.reward, "reward") as channel:
        stub = _stub(channel)
        names = args.rewards.split(",") if args.rewards else [info.name for info in _list(stub, args)]
        for name in names:
            request.rewards.add(name=name.strip()).params.update(_object(args.params, "params"))
        response = stub.ScoreGroup(request, timeout=args.timeout_s)
    samples: list[dict[str, Any]] = [
        {"image": str(path), "scores": [_plain(score) for score in sample.scores]}
        for path, sample in zip(args.images, response.samples, strict=True)
    ]
    for sample in samples:
        for score in sample["scores"]:
            told = score["value"] if "value" in score else f"error: {score['error']['message']}"
            print(f"{sample['image']}  {score['name']:24}{told}")
    if args.json:
        output.print_json({"samples": samples})
    return 0 if all("value" in score for sample in samples for score in sample["scores"]) else 1


def _stub(channel: Any) -> "RewardServiceStub":
    from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub

    return RewardServiceStub(channel)


def _list(stub: Any, args: argparse.Namespace) -> Any:
    from headwater.reward.v1.reward_pb2 import ListRewardsRequest

    return stub.ListRewards(ListRewardsRequest(), timeout=args.timeout_s).rewards


def _plain(message: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _object(text: str, flag: str) -> dict[str, Any]:
    from headwater.errors import InvalidArgument

    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--{flag} {text!r} is no JSON: {error}", field=flag) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"--{flag} {text!r} is no JSON object", field=flag)
    return value


def _mime_type(path: Path) -> str:
    from headwater.errors import InvalidArgument

    if path.suffix.lower() not in MIME_TYPES:
        raise InvalidArgument(f"{path} is none of {', '.join(MIME_TYPES)}", field="images")
    return MIME_TYPES[path.suffix.lower()]


def _read(path: Path) -> bytes:
    from headwater.errors import NotFound

    try:
        return path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}", field="images") from None
