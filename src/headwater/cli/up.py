"""`headwater up`: all services on this machine, in the foreground, until Ctrl-C."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from headwater.cli import options

if TYPE_CHECKING:
    from headwater.supervisor.stack import Stack

_CHECK_INTERVAL_S = 0.5


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("up", help="start all services on this machine", description=__doc__)
    options.add_stack(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the stack and report what happens to it until a signal."""
    from headwater.cli import stack as stacks
    from headwater.supervisor.supervisor import Supervisor

    folder = options.run_dir(args, "up")
    stacks.stop_on_sigterm()
    with Supervisor(folder, stacks.say) as supervisor:
        stack = stacks.make_stack(args, folder)
        stacks.say(f"starting services; logs in {supervisor.logs_dir}")
        stack.start(supervisor)
        print(_welcome(stack), flush=True)
        try:
            while True:
                time.sleep(_CHECK_INTERVAL_S)
                supervisor.check()
        except KeyboardInterrupt:
            print("\nstopping services", file=sys.stderr)
    return 0


def _welcome(stack: "Stack") -> str:
    addresses = "\n".join(f"  {name:<10} {address}" for name, address in stack.addresses().items())
    router, trainer = f" --router {stack.ports.router}", f" --trainer {stack.ports.trainer}"
    if stack.options.port_base == 7400:
        router = trainer = ""
    return (
        f"Headwater is up.\n{addresses}\n\nIn a second terminal:\n"
        f'  headwater submit "a red circle" -n 4 --out out{router}\n'
        f"  headwater train recipes/tiny-geneval-cpu.toml{router}{trainer}\n"
        f"  headwater status --watch{router}{trainer}\n\nCtrl-C stops all services."
    )
