"""A register in a Lease of Kubernetes, an API server that refuses, and a real one that ends."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psserver.standby import kubernetes_register
from psserver.standby.registers import newest_in, register_of, settle
from psserver.standby.succession import Claim, take
from tests.kube_api import running_kube_api
from tests.leases import PATH, Leases, enter_pod, make_place, serving, wait_for_role

SHARD = "shard-1-of-2"
LEASE = f"night-{SHARD}"
FIRST = Claim(epoch=1, holder="p", address="a:1", heir="s", heir_address="b:1")


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leases]:
    found = Leases(tmp_path)
    found.add(LEASE)
    with serving(found) as port:
        enter_pod(monkeypatch, found.account, port)
        yield found


def test_people_see_who_has_a_shard_and_other_annotations_stay(leases: Leases) -> None:
    leases.found[LEASE]["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    assert register_of("kubernetes://night", SHARD).create(FIRST)
    found = leases.found[LEASE]
    assert found["spec"] == {"holderIdentity": "a:1", "leaseTransitions": 1}
    assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert register_of("kubernetes://night", SHARD).newest() == FIRST


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_a_call_that_is_refused_is_no_answer(leases: Leases, status: int) -> None:
    register = register_of("kubernetes://night", SHARD)
    leases.refuse = lambda method: (status, "because") if method == "PUT" else None
    with pytest.raises(OSError, match=f"answers {status}: because"):
        register.create(FIRST)
    leases.refuse = lambda _: (status, "because")
    for ask in (register.newest, lambda: register.create(FIRST)):
        with pytest.raises(OSError, match=f"answers {status}: because"):
            ask()


@pytest.mark.parametrize("body", ["", "<html>", "[]", "{}"])
def test_an_answer_of_something_else_is_none(leases: Leases, body: str) -> None:
    leases.refuse = lambda _: (200, body)
    with pytest.raises(OSError, match=r"https://127\.0\.0\.1"):
        register_of("kubernetes://night", SHARD).newest()


def test_an_annotation_that_is_no_claim_is_an_error(leases: Leases) -> None:
    for text, problem in (
        ("{", "Expecting"),
        ("{}", "None is no epoch"),
        ("[]", "no list"),
    ):
        leases.found[LEASE]["metadata"]["annotations"] = {kubernetes_register.CLAIM: text}
        with pytest.raises(ValueError, match=problem):
            register_of("kubernetes://night", SHARD).newest()


def test_a_lease_that_another_one_changes_meanwhile_is_read_again(leases: Leases) -> None:
    """Also where that was no claim, such as a label by `helm upgrade`."""

    def change(method: str) -> None:
        if method == "PUT":
            leases.refuse = lambda _: None
            metadata = leases.found[LEASE]["metadata"]
            metadata |= {"labels": {"a": "b"}, "resourceVersion": "7"}

    leases.refuse = change
    assert register_of("kubernetes://night", SHARD).create(FIRST)
    metadata = leases.found[LEASE]["metadata"]
    assert (metadata["labels"], metadata["resourceVersion"]) == ({"a": "b"}, "8")


def test_a_token_that_was_renewed_is_used(leases: Leases) -> None:
    register = register_of("kubernetes://night", SHARD)
    assert register.newest() is None
    (leases.account / "token").write_text("second\n")
    assert register.create(FIRST)
    (leases.account / "ca.crt").write_text("")  # As while it is replaced.
    with pytest.raises(OSError, match="certificate"):
        register.newest()


def test_a_process_outside_pods_and_a_wrong_name_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="a register for pods, and this is none"):
        register_of("kubernetes://night", SHARD)
    for url in ("kubernetes://", "kubernetes://Night", "kubernetes://night/x", "kubernetes://-a"):
        with pytest.raises(ConfigError, match="must be like kubernetes://night"):
            register_of(url, SHARD)


def test_with_a_real_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed and returns, tokens end, rights are few, the Lease is deleted."""
    with running_kube_api(tmp_path) as api:
        account = tmp_path / "account"
        place = make_place(api, account, SHARD)
        enter_pod(monkeypatch, account, api.port)
        register = register_of(place, SHARD)
        assert register.create(FIRST)
        lease = f"{PATH}/{place.partition('://')[2]}-{SHARD}"
        token = (account / "token").read_text()
        for method, path in (("GET", PATH), ("DELETE", lease), ("GET", f"{PATH}/other")):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                api.call(method, path, token=token)
        with pytest.raises(OSError, match=r"answers 403: .*cannot get resource"):
            register_of(place, "shard-0-of-2").newest()

        api.stop()
        with pytest.raises(OSError, match="refused"):
            register.newest()
        api.start()
        wait_for_role(api, account, lease.rpartition("/")[2])
        assert newest_in(register, 1) == FIRST

        (account / "token").write_text(token[:-4] + "AAAA")
        with pytest.raises(OSError, match="answers 401"):
            register.newest()
        api.write_account(account, "default", place.partition("://")[2])
        taken = settle(register, lambda newest: take(newest, "s", "silence"), 1)
        assert taken is not None
        found = api.call("GET", lease)
        assert found["spec"] == {"holderIdentity": "b:1", "leaseTransitions": 2}
        assert json.loads(found["metadata"]["annotations"][kubernetes_register.CLAIM])["epoch"] == 2

        api.call("DELETE", lease)
        for ask in (register.newest, lambda: register.create(FIRST)):
            with pytest.raises(OSError, match="answers 404"):
                ask()
        api.call("POST", PATH, {"metadata": {"name": lease.rpartition("/")[2]}})
        with pytest.raises(ValueError, match="it had claim 2, and shows none"):
            newest_in(register, 2)
