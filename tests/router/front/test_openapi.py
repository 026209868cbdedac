"""Whatever fits the OpenAPI document, and what does not, is answered as the document says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error

from kvtier_router.openapi import document
from tests.router.front.rig import Rig

schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def base_url(shared: Rig) -> str:
    return f"http://127.0.0.1:{shared.port}"


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
def test_no_request_makes_a_server_error(case: Case, base_url: str) -> None:
    response = case.call(base_url=base_url, timeout=20)
    case.validate_response(response, checks=[not_a_server_error])
    assert response.status_code in {200, 400, 401, 404, 405, 413, 429, 431}
    if response.status_code >= 400 and response.status_code != 404:
        assert set(response.json()["error"]) >= {"message", "type"}
