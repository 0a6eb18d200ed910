"""Folders of vision-language models, one for each family."""

from pathlib import Path
from typing import Any

import pytest


def _folder_of(family: str) -> Any:
    @pytest.fixture(scope="session", name=f"{family}_dir")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        from tests.data.images.vlm_folder import make_folder

        return make_folder(tmp_path_factory.mktemp(family), family)

    return folder


qwen_dir, gemma_dir, internvl_dir = map(_folder_of, ("qwen", "gemma", "internvl"))
