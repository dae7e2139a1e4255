"""Permissions: the methods of each kind of client, and the rights of a token."""

import pytest

from pscore.errors import AccessError
from pscore.net.credentials import EVERY, TOKEN_KEY, Token
from pscore.pb.ps.v1 import control_pb2
from psserver.access.authorizer import CONTROL, WORKERS_METHODS, Authorizer, Grant

A, B, BOTH = "a" * 16, "b" * 16, "c" * 16
SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"]
AUTHORIZER = Authorizer(
    [Token(job="a", secret=A), Token(job="b", secret=B), Token(job=EVERY, secret=BOTH)]
)


@pytest.mark.parametrize("method", SERVICE.methods_by_name)
def test_a_method_that_names_a_job_is_the_workers_and_no_other_but_describe(method: str) -> None:
    """So that a new method is decided on: add it to `WORKERS_METHODS`, or leave it to control."""
    names_a_job = "job" in SERVICE.methods_by_name[method].input_type.fields_by_name
    assert (CONTROL + method in WORKERS_METHODS) == (names_a_job or method == "Describe")


def test_a_token_opens_its_job_and_nothing_else() -> None:
    assert AUTHORIZER.admit(A) == Grant("a")
    AUTHORIZER.admit(A).require("a")
    with pytest.raises(AccessError, match="the token is for job 'a', not for 'b'"):
        AUTHORIZER.admit(A).require("b")
    with pytest.raises(AccessError, match="of job 'a', and Drain concerns every job"):
        AUTHORIZER.admit(A).require_control("Drain")


def test_a_token_for_everything_opens_everything() -> None:
    AUTHORIZER.admit(BOTH).require("a")
    AUTHORIZER.admit(BOTH).require_control("Drain")


@pytest.mark.parametrize("secret", ["", "x", A[:-1], A + "a", A.upper(), "\0" * 16, "\u00e4" * 16])
def test_nothing_else_opens_anything(secret: str) -> None:
    with pytest.raises(AccessError, match="PACELINE_TOKEN_FILE"):
        AUTHORIZER.admit(secret)


def test_a_call_shows_one_token() -> None:
    assert AUTHORIZER.admit_call([("x", "y"), (TOKEN_KEY, A)]) == Grant("a")
    for metadata in (None, [], [("x", A)], [(TOKEN_KEY, A), (TOKEN_KEY, BOTH)]):
        with pytest.raises(AccessError, match=r"none was sent; .* for .\*., if more"):
            AUTHORIZER.admit_call(metadata)


def test_without_tokens_everything_is_open() -> None:
    assert Authorizer().is_open
    Authorizer().admit("").require_control("Drain")
    Authorizer().admit_call(None).require("any")
