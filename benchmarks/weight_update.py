"""A verified weight update into a worker process, against a raw broadcast of the same bytes in the same run.

python benchmarks/weight_update.py [--width 1024] [--layers 8] [--repeats 5] [--bucket-mb 256] [--json]

Starts Valkey, a router and one worker (diffusers engine) with an SD3 transformer of random weights, and pushes all of
it with the trainer's own sender: plan, gloo or NCCL, staging, swap, read-back, fingerprints at both ends. The raw
broadcast is one flat buffer between two processes over the same transport. `ratio` is update over raw time (medians).
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
from headwater_trainer.weight_sender import WeightSender

from headwater.diffusion import families, tiny_sd3
from headwater.rollout.v1.weights_pb2 import Transport
from headwater.supervisor.stack import Stack, StackOptions
from headwater.supervisor.supervisor import Supervisor
from headwater.supervisor.valkey import valkey_spec
from headwater.weights.group import WeightGroup, connect_store, serve_store

TIMEOUT_S = 120.0


def wide_model(folder, width, layers):
    from diffusers import SD3Transformer2DModel  # after headwater.diffusion: see torchvision_ops there

    model = tiny_sd3.build(folder / tiny_sd3.DEFAULT_NAME)
    config = dict(SD3Transformer2DModel.load_config(model / "transformer"))
    config |= {"num_layers": layers, "attention_head_dim": 64, "num_attention_heads": width // 64,
               "caption_projection_dim": width}  # fmt: skip
    SD3Transformer2DModel.from_config(config).save_pretrained(model / "transformer")
    return model


def member(transport, port, rank, byte_count, device, repeats, times=None):
    store = connect_store("127.0.0.1", port, TIMEOUT_S)
    group = WeightGroup(transport, store, rank=rank, world_size=2, name="raw", host="127.0.0.1", timeout_s=TIMEOUT_S)
    buffer = torch.zeros(byte_count, dtype=torch.uint8, device=device)
    for _ in range(repeats + 1):  # the first one warms up
        started = time.perf_counter()
        group.broadcast(buffer)
        if times is not None:
            times.append(time.perf_counter() - started)
    group.close()


def raw_broadcast(byte_count, repeats):
    gpus = torch.cuda.device_count() >= 2
    transport = Transport.TRANSPORT_NCCL if gpus else Transport.TRANSPORT_GLOO
    devices = ("cuda:0", "cuda:1") if gpus else ("cpu", "cpu")
    store = serve_store("127.0.0.1", TIMEOUT_S)
    peer = multiprocessing.get_context("spawn").Process(
        target=member, args=(transport, store.port, 1, byte_count, devices[1], repeats)
    )
    peer.start()
    times = []
    member(transport, store.port, 0, byte_count, devices[0], repeats, times)
    peer.join(TIMEOUT_S)
    return times[1:]


def updates(model, folder, repeats, bucket_bytes):
    stack = Stack(StackOptions(model=model, engine="diffusers", port_base=17600, rewards="color_shape"), folder / "run")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    module = families.resolve(model).load_component(model, "transformer", torch.float32).to(device)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    with Supervisor(folder / "run") as supervisor:
        valkey = valkey_spec(folder / "valkey", stack.ports.redis)
        for specs in ((valkey,), (stack.router_spec(),), (stack.rollout_spec(0),)):
            supervisor.wait_ready([supervisor.start(spec) for spec in specs])
        sender = WeightSender(
            stack.ports.router, "benchmark", "transformer", timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not sender.publish(tensors, 0).updated:
            assert time.monotonic() < deadline, "the worker did not register"
            time.sleep(0.5)
        reports = [sender.publish(tensors, step) for step in range(1, repeats + 1)]
        sender.close()
    assert all(report.updated == ["rollout-0"] for report in reports), reports
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = wide_model(folder, args.width, args.layers)
        reports = updates(model, folder, args.repeats, args.bucket_mb << 20)
    raw = raw_broadcast(reports[0].byte_count, args.repeats)
    update_s, raw_s = statistics.median(r.seconds for r in reports), statistics.median(raw)
    figures = {
        "transport": reports[0].transport, "tensors": reports[0].tensor_count, "bytes": reports[0].byte_count,
        "update_s": update_s, "raw_broadcast_s": raw_s, "ratio": update_s / raw_s,
    }  # fmt: skip
    print("\n".join(f"{key:16} {value}" for key, value in figures.items()))
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
