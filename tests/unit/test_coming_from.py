"""The pages of docs/coming-from are honest: what works is tested, and each says what does not work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from elastic_ps.api.job import TrainingJobSpec

ROOT = Path(__file__).parents[2]
PAGES = {
    page.stem: page.read_text()
    for page in sorted((ROOT / "docs" / "coming-from").glob("*.md"))
    if page.stem != "index"
}
TESTED = yaml.safe_load(Path(__file__).with_name("coming_from.yaml").read_text())


def rows(page: str) -> list[str]:
    """The first cells of a page's table, without its head."""
    table = [line for line in PAGES[page].splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\)\|", line)[1].strip() for line in table[2:]]


@pytest.mark.parametrize("page", PAGES)
def test_each_row_is_tested(page: str) -> None:
    assert rows(page) == list(TESTED[page])
    for row, proof in TESTED[page].items():
        path, name = proof.split("::")
        found = re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
        assert found, f"{path} has no {name}, which tests {row}"


@pytest.mark.parametrize("page", PAGES)
def test_it_says_what_does_not_work(page: str) -> None:
    assert re.search(
        r"^## What does not work\n\n- \w|^## What does not work\n\n- `", PAGES[page], re.MULTILINE
    )


def test_the_index_lists_all_pages() -> None:
    index = (ROOT / "docs" / "coming-from" / "index.md").read_text()
    assert set(index.split("```")[1].split()[3:]) == set(PAGES)


def test_the_job_in_place_of_a_pytorchjob_is_valid() -> None:
    (lines,) = re.findall(r"^```diff\n(.*?)^```", PAGES["kubeflow"], re.DOTALL | re.MULTILINE)
    job = yaml.safe_load("\n".join(line[1:] for line in lines.splitlines() if not line.startswith("-")))
    assert job["kind"] == "TrainingJob"
    assert TrainingJobSpec.model_validate(job["spec"]).worker.max_replicas == 8
