"""The reference pages of the environments agree with the code, and have all settings and shipped environments."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from environments.generate_docs import PAGES, SHIPPED, environments_page, run, sdk_page
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig
from environments.tasks.data import DataFields
from environments.tasks.question_env import QuestionEnvConfig

from .test_configs import environment_class

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


@pytest.mark.parametrize("prefix", ["openai", "teacher"])
def test_every_setting_of_an_inference_server_and_of_a_teacher_is_on_the_page_with_its_type(prefix):
    page = environments_page()
    for name in APIServerConfig.model_fields:
        assert re.search(rf"^\| `--{prefix}\.{name.replace('_', '-')}` \| \w+ \|", page, re.MULTILINE), name
    assert "| `--teacher.server-type` | choice | `vllm` |" in page, "a teacher's own default"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_has_its_data_an_example_and_each_of_its_own_settings_on_the_page(name):
    _, _, rest = environments_page().partition(f"\n## `{name}.py`\n")
    section = rest.partition("\n## ")[0]
    assert f"    python environments/{name}.py " in section
    (data,) = re.findall(r"^Data: .+?\n\n", section + "\n\n", re.MULTILINE | re.DOTALL)
    config, _ = environment_class(f"{name}.py").config_init()
    dataset = getattr(config, "dataset_name", None)
    assert dataset is None or f"`{dataset}`" in data
    for field in set(type(config).model_fields) - set(QuestionEnvConfig.model_fields):
        assert f"`--env.{field.replace('_', '-')}`" in section


@pytest.mark.parametrize("name", SHIPPED)
def test_a_setting_of_environments_with_questions_is_one_of_each_of_them_that_the_page_does_not_except(name):
    _, _, rest = environments_page().partition("\n### Of environments with questions\n\n")
    introduction, excepted = rest.partition("\n\n")[0], rest.partition(" have these.")[0]
    config, _ = environment_class(f"{name}.py").config_init()
    lacking = set(QuestionEnvConfig.model_fields) - set(type(config).model_fields)
    assert (f"`{name}.py`" in excepted) == (not isinstance(config, DataFields))
    unnamed = [field for field in lacking if f"`--env.{field.replace('_', '-')}`" not in introduction]
    assert unnamed == [] or not isinstance(config, DataFields)


def test_every_public_method_of_an_environment_is_on_the_page():
    page = sdk_page()
    names = {name for name, value in vars(BaseEnv).items() if inspect.isfunction(value) and not name.startswith("_")}
    missing = {name for name in names if f"`{name}(" not in page and f"`await {name}(" not in page}
    assert missing == set()


def test_a_mistyped_page_is_reported():
    with pytest.raises(ConfigError, match="did you mean environments"):
        run(["environment"])
