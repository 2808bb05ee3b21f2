"""`headwater certs`, the table of roles in the documentation, and Redis passwords."""

import os
import re
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import rpcs
from cryptography import x509

from headwater.cli.main import main
from headwater.errors import InvalidArgument
from headwater.pki.folder import SERVICES
from headwater.rpc.authorization import ROLES, role_of
from headwater.rpc.security import Security
from headwater.stream.address import split_password, take, with_password
from headwater.stream.connection import address_of
from headwater.supervisor.checks import check_redis
from headwater.supervisor.stack import Stack, StackOptions
from headwater.weights.group import connect_store, serve_store

ROOT = Path(__file__).parents[2]


def test_the_table_of_roles_in_the_documentation_is_that_of_the_protocol():
    names = {role: name for name, role in ROLES.items()}
    rows = re.findall(r"^\| `(\w+Service\.\w+)` \| (\w+) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(
        (f"{m.containing_service.name}.{m.name}", names[role_of(rpcs.path_of(m))]) for m in rpcs.methods()
    )


def test_certs_makes_a_certificate_for_each_service_and_private_files(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--host", "gpu7.example.org", "--host", "10.0.0.7", "--days", "30"]) == 0
    printed = capsys.readouterr().out
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    assert f"{authority.not_valid_after_utc:%Y-%m-%d %H:%M} UTC" in printed
    for name in (*SERVICES, "local", "client"):
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        expected = set(SERVICES) if name == "local" else {name}
        assert {*expected, "localhost", "127.0.0.1", "::1", "gpu7.example.org", "10.0.0.7"} == set(hosts)
        assert certificate.not_valid_after_utc == authority.not_valid_after_utc
        ssl.create_default_context().load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if path.suffix == ".crt" else 0o600), path
    for role in ROLES:
        token = (folder / f"{role}.token").read_text().strip()
        assert len(token) >= 43
        assert token not in (folder / "tokens.toml").read_text() + printed


def test_certs_overwrites_only_by_force_and_can_let_containers_read(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert main(["certs", str(folder)]) == 0
    before = (folder / "ca.crt").read_bytes()
    assert main(["certs", str(folder)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (folder / "ca.crt").read_bytes() == before
    assert main(["certs", str(folder), "--force", "--mode", "0644"]) == 0
    assert (folder / "ca.crt").read_bytes() != before
    assert stat.S_IMODE((folder / "router.key").stat().st_mode) == 0o644
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--days", "0"], "--days"),
        (["--days", "4000"], "--days"),
        (["--host", "a b"], "--host"),
        (["--host", ""], "--host"),
    ],
)
def test_certs_names_what_is_wrong(tmp_path, capsys, arguments, words):
    assert main(["certs", str(tmp_path / "certs"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_certs_refuses_keys_for_everybody_in_a_folder_for_everybody(tmp_path, capsys):
    folder = tmp_path / "certs"
    folder.mkdir(mode=0o755)
    assert main(["certs", str(folder), "--mode", "0644"]) == 2
    assert "chmod 700" in capsys.readouterr().err
    assert not list(folder.iterdir())
    assert main(["certs", str(folder)]) == 0


@pytest.mark.parametrize("mode", ["0777", "0600x", "0666", "0004"])
def test_certs_refuses_modes_that_let_others_write(tmp_path, capsys, mode):
    with pytest.raises(SystemExit):
        main(["certs", str(tmp_path / "certs"), "--mode", mode])
    assert "--mode" in capsys.readouterr().err


def test_the_commands_start_without_cryptography_and_grpc():
    loaded = "{'cryptography', 'grpc', 'redis'} & {*sys.modules}"
    code = f"import sys, headwater.cli.main as m; m.build_parser(); print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"


def test_up_passes_security_on_and_shows_no_password(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    security = Security("ca.crt", "local.crt", "local.key", "admin.token", "tokens.toml")
    url = "redis://:p%40ss@127.0.0.1:6379/0"
    stack = Stack(StackOptions(model=tmp_path, redis_url=url, security=security), tmp_path)
    for spec in (stack.router_spec(), stack.reward_spec(), stack.rollout_spec(0), stack.trainer_spec()):
        line = spec.restart_command()
        assert " ".join(security.flags()) in line
        assert "p%40ss" not in line
        assert "p@ss" not in line
    assert (tmp_path / "redis.password").read_text() == "p@ss"
    shown = f"{stack.addresses()} {stack.options}"
    assert "p%40ss" not in shown
    assert stack.addresses()["redis"] == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        ("redis://h:1/0", "redis://h:1/0", ""),
        ("redis://:s@h:1/0", "redis://h:1/0", "s"),
        ("rediss://user:s%2F%40@h:1/0?ssl_ca_certs=/c", "rediss://user@h:1/0?ssl_ca_certs=/c", "s/@"),
        ("redis://:a@b@h:1", "redis://h:1", "a@b"),
    ],
)
def test_a_password_leaves_the_url_and_comes_back(url, bare, password):
    assert split_password(url) == (bare, password)
    if password:
        assert split_password(with_password(bare, password)) == (bare, password)


def test_a_password_file_is_read_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "password"
    path.write_text("p@ss/word\n")
    assert take({"redis": "redis://h:1/0", "redis_password_file": str(path)}) == "redis://:p%40ss%2Fword@h:1/0"
    for content in ("", "\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="--redis-password-file"):
            take({"redis": "redis://h:1/0", "redis_password_file": str(path)})


@pytest.mark.parametrize("url", ["redis://:se/cret@h:1", "redis://:secret@h:port", "http://:secret@h:1"])
def test_no_error_shows_a_password(url):
    for check in (address_of, check_redis):
        with pytest.raises(InvalidArgument) as caught:
            check(url)
        assert "cret" not in caught.value.message
        assert caught.value.__cause__ is None


def test_the_rendezvous_of_weights_listens_on_its_address_only():
    store = serve_store("127.0.0.1", 5.0)
    connect_store("127.0.0.1", store.port, 5.0).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    with pytest.raises(InvalidArgument, match="--weight-host"):
        serve_store("192.0.2.1", 5.0)


def test_environment_variables_are_the_defaults_of_the_flags(monkeypatch, tmp_path):
    from headwater_router.config import parse_args

    monkeypatch.setenv("HEADWATER_TLS_CA", "ca")
    monkeypatch.setenv("HEADWATER_TOKENS", "list")
    security = parse_args(["--tls-ca", "other"]).security
    assert (security.tls_ca, security.tokens, security.token_file) == ("other", "list", "")
    assert os.environ["HEADWATER_TLS_CA"] == Security.from_environment().tls_ca
