"""Every notebook runs top to bottom, is kept with the outputs of such a run, and links to what exists."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
LARGEST = 1 << 20  # bytes of a notebook with its outputs
CELL_SECONDS, STARTUP_SECONDS = 100, 60

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def settings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides what the user has set up for Jupyter, IPython, matplotlib and XLA."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("MPLBACKEND", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each
@pytest.mark.usefixtures("settings_of_its_own")
def test_runs(path: Path, tmp_path: Path) -> None:
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        startup_timeout=STARTUP_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    for cell in code_cells(notebook):
        for output in cell.outputs:
            said = output.text if output.output_type == "stream" and output.name == "stderr" else ""
            assert not re.search(r"\w*(Warning|Error): ", said), f"cell {cell.id}:\n{said}"


@each
def test_kept_with_the_outputs_of_one_run(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {(output.output_type, output.get("name")) for cell in cells for output in cell.outputs}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert path.stat().st_size < LARGEST


@each
def test_links(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def anchors(path: Path) -> set[str]:
    """The anchors that Jupyter gives to the headings of a notebook, and GitHub to those of a Markdown file."""
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        return {heading.replace(" ", "-") for heading in headings(text)}
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(path.read_text())}


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)
