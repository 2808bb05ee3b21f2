"""Addresses at which others reach this machine."""

import pytest

from headwater.errors import Unavailable
from headwater.rpc.address import host_of, local_address, reachable_address


def test_a_bind_to_every_address_is_said_as_the_one_towards_the_peer():
    assert reachable_address("0.0.0.0:7410", "127.0.0.1:7400") == "127.0.0.1:7410"
    assert reachable_address("[::]:7410", "localhost:7400") == "127.0.0.1:7410"
    assert reachable_address("10.1.2.3:7410", "127.0.0.1:7400") == "10.1.2.3:7410"


def test_the_host_of_a_target_with_a_scheme():
    assert host_of("dns:///reward:7401") == "reward"
    assert host_of("router:7400") == "router"


def test_a_name_that_does_not_resolve_is_unavailable():
    with pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        reachable_address("0.0.0.0:7410", "no-such-host.invalid:7400")


def test_loopback_is_reached_from_itself():
    assert local_address("127.0.0.2") == "127.0.0.2"
