"""Model directories that several tests of text read."""

from pathlib import Path

import pytest

from kvtier.text import TextModel
from tests.support.chat_templates import TEMPLATES
from tests.support.text_models import byte_level_bpe, smollm2, write_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), byte_level_bpe())


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    """A model for each of the templates, by its name."""
    folder = tmp_path_factory.mktemp("templates")
    return {
        name: TextModel.load(write_model(folder / name, byte_level_bpe(), template))
        for name, template in TEMPLATES.items()
    }
