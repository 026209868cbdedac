"""Model directories that several tests of text read."""

from pathlib import Path

import pytest

from tests.support.text_models import byte_level_bpe, smollm2, write_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), byte_level_bpe())


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.mktemp("smollm2"))
