"""Scopes and salts: private by default, shared by decision, never guessable."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.encoding import encode
from kvtier.core.scopes import ScopeRules, SharedScope, private_scope, scope_salt, shared_scope
from kvtier.errors import CallerError
from kvtier.types import ScopeId, TenantId

SECRET = b"0123456789abcdef"
ACME, GLOBEX, INITECH = TenantId("acme"), TenantId("globex"), TenantId("initech")

tenant_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).map(
    TenantId
)


def test_tenants_are_private_by_default() -> None:
    rules = ScopeRules()
    assert rules.scope_of(ACME) == private_scope(ACME)
    assert rules.scope_of(ACME) != rules.scope_of(GLOBEX)


def test_tenants_share_only_the_scope_an_operator_let_them_join() -> None:
    rules = ScopeRules((SharedScope("public", frozenset([ACME, GLOBEX])),))
    assert rules.scope_of(ACME) == rules.scope_of(GLOBEX) == shared_scope("public")
    assert rules.scope_of(INITECH) == private_scope(INITECH)


@given(tenant_ids, tenant_ids)
def test_a_tenant_named_like_a_shared_scope_keeps_a_scope_of_its_own(
    tenant_id: TenantId, name: str
) -> None:
    assert private_scope(tenant_id) != shared_scope(name)
    assert private_scope(TenantId(shared_scope(name))) != shared_scope(name)
    rules = ScopeRules((SharedScope(tenant_id, frozenset([ACME])),))
    if tenant_id != ACME:
        assert rules.scope_of(tenant_id) != rules.scope_of(ACME)


def test_a_tenant_in_two_scopes_and_a_scope_named_twice_are_refused() -> None:
    first = SharedScope("public", frozenset([ACME]))
    with pytest.raises(CallerError, match=r"'acme'.*'beta'.*'public'"):
        ScopeRules((first, SharedScope("beta", frozenset([ACME]))))
    with pytest.raises(CallerError, match="twice"):
        ScopeRules((first, SharedScope("public", frozenset([GLOBEX]))))


@pytest.mark.parametrize("name", ["", "\ud800", "x" * 1025])
def test_names_without_meaning_are_refused(name: str) -> None:
    with pytest.raises(CallerError):
        private_scope(TenantId(name))
    with pytest.raises(CallerError):
        shared_scope(name)
    with pytest.raises(CallerError):
        SharedScope("public", frozenset([TenantId(name)]))


def test_a_salt_is_the_hmac_of_the_tagged_scope_and_client_salt() -> None:
    scope_id = private_scope(ACME)
    message = encode("kvtier.scope-salt.v1", {1: scope_id, 2: "mine"})
    expected = hmac.new(SECRET, message, hashlib.sha256).hexdigest()
    assert scope_salt(SECRET, scope_id, "mine") == expected
    assert len(expected) == 64


def test_secret_scope_and_client_salt_each_change_the_salt() -> None:
    salts = [
        scope_salt(SECRET, ScopeId("ab"), "c"),
        scope_salt(SECRET, ScopeId("a"), "bc"),
        scope_salt(SECRET, ScopeId("ab"), None),
        scope_salt(SECRET, ScopeId("ab"), ""),
        scope_salt(SECRET, ScopeId("abc"), None),
        scope_salt(SECRET + b"!", ScopeId("ab"), "c"),
    ]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("secret", [b"", b"short", "0123456789abcdef"])
def test_a_weak_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(CallerError, match="secret"):
        scope_salt(secret, private_scope(ACME), None)


def test_an_empty_scope_and_an_overlong_client_salt_are_refused() -> None:
    with pytest.raises(CallerError):
        scope_salt(SECRET, ScopeId(""), None)
    with pytest.raises(CallerError):
        scope_salt(SECRET, private_scope(ACME), "x" * 2000)
