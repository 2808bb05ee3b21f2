"""`headwater certs DIR`: a development CA, certificates, keys and tokens for all services."""

import argparse
from pathlib import Path

DEFAULT_DAYS = 365


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "certs",
        help="make certificates and tokens",
        description="Make a development CA, a certificate and key per service and for clients, a token per role, and "
        "the list of tokens for servers. See docs/security.md.",
    )
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path, help="folder for the files")
    add(
        "--host", metavar="NAME", dest="hosts", action="append", default=[],
        help="a name or address under which services are reached, beside their own names and this machine (repeatable)",
    )  # fmt: skip
    add("--days", metavar="N", type=int, default=DEFAULT_DAYS, help="validity (default %(default)s)")
    add(
        "--mode", metavar="MODE", type=_mode, default=0o600,
        help="permissions of keys and tokens (default 0600); 0644 where containers read them as another user",
    )  # fmt: skip
    add("--force", action="store_true", help="replace what is in the folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and say how to use them."""
    from headwater.errors import FailedPrecondition

    try:
        from headwater.pki import folder
    except ImportError as error:
        raise FailedPrecondition(
            f"{error.name or 'cryptography'} is not installed: pip install 'headwater[certs]'", field="cryptography"
        ) from error
    expires = folder.fill(args.dir, hosts=args.hosts, days=args.days, mode=args.mode, force=args.force)
    print(_text(args.dir.resolve(), f"{expires:%Y-%m-%d %H:%M} UTC"))
    return 0


def _text(folder: Path, expires: str) -> str:
    return (
        f"Certificates in {folder}, valid until {expires}. Keep ca.key off the machines that serve.\n\n"
        f"A service, e.g. a router (it calls others with the role worker):\n"
        f"  headwater-router --tls-ca {folder}/ca.crt --tls-cert {folder}/router.crt --tls-key {folder}/router.key \\\n"
        f"      --token-file {folder}/worker.token --tokens {folder}/tokens.toml\n\n"
        f"All services of this machine:\n"
        f"  headwater up --tls-ca {folder}/ca.crt --tls-cert {folder}/local.crt --tls-key {folder}/local.key \\\n"
        f"      --token-file {folder}/admin.token --tokens {folder}/tokens.toml\n\n"
        f"A client (admin.token to start training):\n"
        f"  export HEADWATER_TLS_CA={folder}/ca.crt HEADWATER_TLS_CERT={folder}/client.crt \\\n"
        f"      HEADWATER_TLS_KEY={folder}/client.key HEADWATER_TOKEN_FILE={folder}/client.token"
    )


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if mode & ~0o644 or not mode & 0o400:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 0400, 0600, 0440, 0640, 0444, 0644")
    return mode
