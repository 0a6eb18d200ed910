from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.data.pictures.vlm_folder import make_folder

    return make_folder(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.fixture(scope="session")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.data.pictures.vlm_folder import make_folder

    return make_folder(tmp_path_factory.mktemp("gemma"), "gemma")


@pytest.fixture(scope="session")
def internvl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.data.pictures.vlm_folder import make_folder

    return make_folder(tmp_path_factory.mktemp("internvl"), "internvl")
