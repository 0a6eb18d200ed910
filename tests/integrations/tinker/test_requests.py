"""Requests are listed, bounded, repeated and refused as Tinker's own client expects."""

from collections.abc import Iterator

import pytest

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")

import tinker

from tests.integrations.tinker.serving import NAME, ask, client, serving
from treering.serving.tinker.routes import TinkerRoutes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerRoutes]]:
    with serving(tmp_path_factory.mktemp("checkpoints"), max_sessions=512, max_models=512) as opened:
        yield opened


def test_runs_and_checkpoints_are_listed_page_by_page(server: tuple[str, TinkerRoutes]) -> None:
    service = client(server[0])
    for _ in range(2):
        trained = service.create_lora_training_client(base_model=NAME, rank=2).result()
        for name in ("a", "b"):
            trained.save_state(name).result()
    rest = tinker.RestClient(base_url=server[0], api_key="tml-test")
    assert rest.list_training_runs(limit=1, offset=5).result().training_runs == []
    pages = [rest.list_training_runs(limit=1, offset=i).result() for i in range(2)]
    assert len({each.training_run_id for page in pages for each in page.training_runs}) == 2
    assert (pages[1].cursor.offset, pages[1].cursor.limit, pages[1].cursor.total_count) == (1, 1, 2)
    whole = rest.list_user_checkpoints().result()
    assert len(whole.checkpoints) == whole.cursor.total_count == 4
    assert rest.list_user_checkpoints(limit=3, offset=2).result().checkpoints == whole.checkpoints[2:]
    status, answer = ask(server[0], "checkpoints?limit=-1", None, "GET")
    assert (status, "limit" in answer["error"]["message"]) == (400, True)
