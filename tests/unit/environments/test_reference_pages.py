"""The reference pages of the environments are what the code says now, and leave no setting and no shipped one out."""

import inspect
import sys
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from environments.generate_docs import PAGES, SHIPPED, environments_page, run, sdk_page
from environments.sdk import BaseEnv, BaseEnvConfig

DOCS = Path(__file__).parents[3] / "docs" / "reference"
FILES = {"environments": DOCS / "environments.md", "sdk": DOCS / "environment-sdk.md"}


@pytest.mark.parametrize("page", FILES)
def test_the_page_is_what_the_code_says(page):
    assert FILES[page].read_text() == PAGES[page](), f"write it anew: python -m environments.generate_docs {page}"


def test_every_shipped_environment_and_setting_is_on_the_page():
    files = {path.stem for path in Path(sys.modules["environments.generate_docs"].__file__).parent.glob("*_server*.py")}
    assert files == set(SHIPPED)
    page = environments_page()
    for name in BaseEnvConfig.model_fields:
        assert f"`--env.{name.replace('_', '-')}`" in page


def test_every_public_method_of_an_environment_is_on_the_page():
    page = sdk_page()
    names = {name for name, value in vars(BaseEnv).items() if inspect.isfunction(value) and not name.startswith("_")}
    missing = {name for name in names if f"`{name}(" not in page and f"`await {name}(" not in page}
    assert missing == set()


def test_a_mistyped_page_is_told():
    with pytest.raises(ConfigError, match="did you mean environments"):
        run(["environment"])
